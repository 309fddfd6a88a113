"""What calibrated algorithms cost SmolLM2-135M, compared with rounding to nearest in the same format.

`python algorithms.py --json algorithms.json`. They are calibrated on docstrings of the standard library and
measured on other text, the sections of Python's documentation. With `--llama FOLDER` of llama.cpp's programs
(`python scripts/build_llama.py FOLDER llama-quantize llama-imatrix`), K-quants by these too. A run goes on
where the one before ended.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import llama
import torch
from smollm2 import evaluate, model
from torch import Tensor, nn

from ao_core import quantize_

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / name) for name in ("minilm", "calibrated")
)
from calibrated.cells import METHODS, NEAREST, Cell, cells_of
from calibrated.run import Subject, made_by_ao, measure
from minilm_demo import corpus

#: what is measured: first what the formats are judged by
TABLE: list[tuple[str, tuple[str, ...]]] = [
    ("int8", (NEAREST,)),
    ("W8A8", ("SmoothQuant", "SmoothQuant, GPTQ")),
    ("int4 g128", (NEAREST, "GPTQ")),
    ("int3 g64", (NEAREST, "GPTQ")),
    ("W4A4 mxfp4", (NEAREST, "block rotation, GPTQ")),
    ("W4A4 int4", ("GPTQ", "rotation, GPTQ")),
    ("int2 g64", ("GPTQ",)),
    ("trellis 2", ("GPTQ",)),
    ("int4 g128", ("AWQ", "importance")),
    ("W8A8", (NEAREST,)),
]
#: what takes as long as all of that, after all seeds of it
LONG: list[tuple[str, tuple[str, ...]]] = [
    ("int2 g64", ("AutoRound",)),
    ("int3 g64", ("AutoRound",)),
]
#: format -> type of files of llama.cpp
FILES = {"q4_k": "Q4_K_S", "q3_k": "Q3_K_S"}
#: methods for these, besides llama.cpp's own
OURS = ("importance", "GPTQ")


def main() -> None:
    args = parse_args()
    windows = evaluate.spread(model.tokens(evaluate.text()), args.windows)
    about = {"tokens": windows.numel(), "calibration_tokens": args.tokens}
    table = list(TABLE)
    if args.llama is not None:
        table += [(name, (llama.NAME, *OURS)) for name in FILES]
    cells = [
        cell
        for part in (table, LONG)
        for cell in cells_of(part, args.seeds)
        if args.only in " ".join(map(str, cell))
    ]
    # the original computes the same function for every seed; its predictions take 1.6 GB
    logs = evaluate.predict(original(0), windows)

    def quality(seed: int, made: nn.Module) -> dict[str, float]:
        return asdict(evaluate.quality(logs, windows, partial(evaluate.predict, made)))

    subject = Subject(original, partial(calibration, args.tokens), quality)

    def make(dense: nn.Module, cell: Cell) -> tuple[nn.Module, float]:
        if cell.method == llama.NAME:
            text = windows_of(args.tokens, cell.seed)
            return llama.quantized(dense, FILES[cell.format], args.llama, text)
        if cell.format not in FILES:
            return made_by_ao(subject, dense, cell)
        config = llama.base(FILES[cell.format], METHODS[cell.method], args.llama)
        quantize_(dense, config, data=subject.data(cell.seed))
        return dense, 0.0

    measure(args.json, about, cells, subject, make)


@cache
def original(seed: int) -> nn.Module:
    """The model with the weights of a seed."""
    return model.off_grid(model.load(), seed)


def calibration(count: int, seed: int) -> list[dict[str, Any]]:
    """Calls with windows of so many tokens of docstrings in all; another seed has others."""
    # with a cache, blocks could not be run one by one
    return [{"input_ids": window[None], "use_cache": False} for window in windows_of(count, seed)]


def windows_of(count: int, seed: int) -> Tensor:
    """So many tokens of docstrings in all, in windows."""
    windows = _windows()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return windows[order[: count // evaluate.CONTEXT]]


@cache
def _windows() -> Tensor:
    pairs = corpus.docstring_pairs(2000)
    tokens = model.tokens("\n\n".join(f"{pair.query}\n{pair.document}" for pair in pairs))
    return tokens[: len(tokens) // evaluate.CONTEXT * evaluate.CONTEXT].view(-1, evaluate.CONTEXT)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    parser.add_argument("--windows", type=int, default=16, help="of text, 512 tokens each (16)")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on (8192)")
    parser.add_argument("--seeds", type=int, default=3, help="weights and calibration texts (3)")
    parser.add_argument("--only", default="", help="variants whose name has this")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
