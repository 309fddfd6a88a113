"""What calibrated algorithms cost SmolLM2-135M, compared with rounding to nearest in the same format.

`python algorithms.py --json algorithms.json`. They are calibrated on docstrings of the standard library and
measured on other text, the sections of Python's documentation. With `--llama FOLDER` of llama.cpp's programs
(`python scripts/build_llama.py FOLDER llama-quantize llama-imatrix`), K-quants by these too.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import llama
import torch
from smollm2 import evaluate, model
from torch import Tensor, nn
from tqdm import tqdm

from ao_core import Config, QTensor, quantize_
from ao_quant import (
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    ImatrixConfig,
    Int4DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    RotateConfig,
    SmoothQuantConfig,
    TrellisWeightOnlyConfig,
    UIntxWeightOnlyConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo import corpus, results

FORMATS: dict[str, Config] = {
    "int4 g128": Int4WeightOnlyConfig(128),
    "int4 g32": Int4WeightOnlyConfig(32),
    "int3 g64": UIntxWeightOnlyConfig(3, 64),
    "int2 g64": UIntxWeightOnlyConfig(2, 64),
    "trellis 4": TrellisWeightOnlyConfig(4),
    "trellis 3": TrellisWeightOnlyConfig(3),
    "trellis 2": TrellisWeightOnlyConfig(2),
    "int8": Int8WeightOnlyConfig(),
    "W8A8": Int8DynamicActivationInt8WeightConfig(),
    "W4A4 int4": Int4DynamicActivationInt4WeightConfig(128),
    "W4A4 mxfp4": MXDynamicActivationMXWeightConfig("e2m1", "e2m1", "even"),
}
METHODS: dict[str, Callable[[Config], list[Config]]] = {
    "rounding to nearest": lambda base: [base],
    "importance": lambda base: [ImatrixConfig(base)],
    "AWQ": lambda base: [AWQConfig(base)],
    "SmoothQuant": lambda base: [SmoothQuantConfig(base)],
    "SmoothQuant, alpha searched": lambda base: [SmoothQuantConfig(base, alpha="search")],
    "GPTQ": lambda base: [GPTQConfig(base)],
    "AutoRound": lambda base: [AutoRoundConfig(base)],
    "rotation, rounding": lambda base: [RotateConfig(), base],
    "rotation, GPTQ": lambda base: [RotateConfig(), GPTQConfig(base)],
    "block rotation, GPTQ": lambda base: [RotateConfig(block=32), GPTQConfig(base)],
}
#: methods for weights alone, and those for activations, too
_ONLY = ("rounding to nearest", "importance", "AWQ", "GPTQ", "AutoRound")
_SMOOTHED = ("rounding to nearest", "SmoothQuant", "SmoothQuant, alpha searched")
_ROTATED = ("rounding to nearest", "GPTQ", "rotation, rounding", "rotation, GPTQ")
#: format -> the methods that are measured with it; weights alone where it is not there
CHOSEN: dict[str, tuple[str, ...]] = {
    # rotated, after which no column stands out
    **dict.fromkeys(("trellis 4", "trellis 3", "trellis 2"), ("rounding to nearest", "GPTQ")),
    "int8": ("rounding to nearest",),
    "W8A8": _SMOOTHED,
    "W4A4 int4": _ROTATED,
    "W4A4 mxfp4": (*_ROTATED, "block rotation, GPTQ"),
}
#: format -> type of files of llama.cpp
FILES = {"q4_k": "Q4_K_S", "q3_k": "Q3_K_S"}
#: methods for these, besides llama.cpp's own
OURS = ("rounding to nearest", "importance", "GPTQ")


def main() -> None:
    args = parse_args()
    windows = evaluate.spread(model.tokens(evaluate.text()), args.windows)
    about = results.environment() | {"tokens": windows.numel(), "calibration_tokens": args.tokens}
    data: dict[str, Any] = {"about": about, "rows": []}
    if args.json.exists():
        data["rows"] = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    done = {(row["format"], row["method"], row["seed"]) for row in data["rows"]}
    cells = [(name, method) for name in FORMATS for method in CHOSEN.get(name, _ONLY)]
    if args.llama is not None:
        cells += product(FILES, (llama.NAME, *OURS))
    wanted = [(*cell, seed) for seed, cell in product(range(args.seeds), cells)]
    wanted = [one for one in wanted if one not in done and args.only in " ".join(map(str, one))]
    with tqdm(total=len(wanted)) as bar:
        for seed, rows in groupby(wanted, key=lambda one: one[2]):
            original = model.off_grid(model.load(), seed)
            logs = evaluate.predict(original, windows)
            for name, method, _ in rows:
                made, seconds = quantized(original, name, method, args, seed)
                found = asdict(evaluate.quality(logs, windows, partial(evaluate.predict, made)))
                row: dict[str, Any] = {
                    "format": name,
                    "method": method,
                    "seed": seed,
                    "seconds": round(seconds, 1),
                }
                if method != llama.NAME:
                    row["bits_per_weight"] = round(_bits_per_weight(made), 4)
                data["rows"].append(row | {k: float(f"{v:.6g}") for k, v in found.items()})
                args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
                bar.update()


def quantized(
    original: nn.Module, name: str, method: str, args: argparse.Namespace, seed: int
) -> tuple[nn.Module, float]:
    """A variant, and the seconds that it took to make."""
    # not one that shares parameters, which rotations change
    made = copy.deepcopy(original)
    if method == llama.NAME:
        return llama.quantized(made, FILES[name], args.llama, windows_of(args.tokens, seed))
    if name in FORMATS:
        configs = METHODS[method](FORMATS[name])
    else:
        configs = [llama.base(FILES[name], METHODS[method], args.llama)]
    plain = method == "rounding to nearest"
    data = None if plain else calibration(args.tokens, seed)
    start = time.perf_counter()
    quantize_(made, configs, data=data)
    return made, time.perf_counter() - start


def _bits_per_weight(made: Any) -> float:
    """Bits of the quantized weights, scales and all, over their number; the head, of 8 bits, aside."""
    weights = [p for p in made.parameters() if isinstance(p, QTensor) and len(p) < 10_000]
    return 8 * sum(p.stored_bytes for p in weights) / sum(p.numel() for p in weights)


def calibration(count: int, seed: int) -> list[dict[str, Any]]:
    """Calls with windows of so many tokens of docstrings in all; another seed has others."""
    # with a cache, blocks could not be run one by one
    return [{"input_ids": window[None], "use_cache": False} for window in windows_of(count, seed)]


def windows_of(count: int, seed: int) -> Tensor:
    """So many tokens of docstrings in all, in windows."""
    pairs = corpus.docstring_pairs(2000)
    text = "\n\n".join(f"{pair.query}\n{pair.document}" for pair in pairs)
    tokens = model.tokens(text)
    windows = tokens[: len(tokens) // evaluate.CONTEXT * evaluate.CONTEXT].view(
        -1, evaluate.CONTEXT
    )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return windows[order[: count // evaluate.CONTEXT]]


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
