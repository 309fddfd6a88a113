"""What calibrated algorithms cost SmolLM2-135M, compared with rounding to nearest in the same format.

`python algorithms.py --json algorithms.json`. They are calibrated on docstrings of the standard library and
measured on other text, the sections of Python's documentation.
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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from smollm2 import evaluate, model
from tqdm import tqdm

from ao_core import Config, QTensor, quantize_
from ao_quant import (
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
    "rotation, rounding": lambda base: [RotateConfig(), base],
    "rotation, GPTQ": lambda base: [RotateConfig(), GPTQConfig(base)],
    "block rotation, GPTQ": lambda base: [RotateConfig(block=32), GPTQConfig(base)],
}
#: methods for weights alone, and those for activations, too
_ONLY = ("rounding to nearest", "importance", "AWQ", "GPTQ")
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


def main() -> None:
    args = parse_args()
    windows = evaluate.spread(model.tokens(evaluate.text()), args.windows)
    about = results.environment() | {"tokens": windows.numel(), "calibration_tokens": args.tokens}
    data: dict[str, Any] = {"about": about, "rows": []}
    if args.json.exists():
        data["rows"] = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    done = {(row["format"], row["method"], row["seed"]) for row in data["rows"]}
    variants = [(name, method) for name in FORMATS for method in CHOSEN.get(name, _ONLY)]
    wanted = [(*one, seed) for one, seed in product(variants, range(args.seeds))]
    wanted = [one for one in wanted if one not in done]
    for name, method, seed in tqdm([one for one in wanted if args.only in " ".join(map(str, one))]):
        original = model.off_grid(model.load(), seed)
        logs = evaluate.predict(original, windows)
        start = time.perf_counter()
        # not one that shares parameters, which rotations change
        made, configs = copy.deepcopy(original), METHODS[method](FORMATS[name])
        plain = configs == [FORMATS[name]]
        quantize_(made, configs, data=None if plain else calibration(args.tokens, seed))
        seconds = time.perf_counter() - start
        found = asdict(evaluate.quality(logs, windows, partial(evaluate.predict, made)))
        row = {"format": name, "method": method, "seed": seed, "seconds": round(seconds, 1)}
        row["bits_per_weight"] = round(_bits_per_weight(made), 4)
        data["rows"].append(row | {key: float(f"{value:.6g}") for key, value in found.items()})
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _bits_per_weight(made: Any) -> float:
    """Bits of the quantized weights, scales and all, over their number; the head, of 8 bits, aside."""
    weights = [p for p in made.parameters() if isinstance(p, QTensor) and len(p) < 10_000]
    return 8 * sum(p.stored_bytes for p in weights) / sum(p.numel() for p in weights)


def calibration(count: int, seed: int) -> list[dict[str, Any]]:
    """Calls with windows of so many tokens of docstrings in all; another seed has others."""
    pairs = corpus.docstring_pairs(2000)
    text = "\n\n".join(f"{pair.query}\n{pair.document}" for pair in pairs)
    tokens = model.tokens(text)
    windows = tokens[: len(tokens) // evaluate.CONTEXT * evaluate.CONTEXT].view(
        -1, evaluate.CONTEXT
    )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    chosen = windows[order[: count // evaluate.CONTEXT]]
    # with a cache, blocks could not be run one by one
    return [{"input_ids": window[None], "use_cache": False} for window in chosen]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    parser.add_argument("--windows", type=int, default=16, help="of text, 512 tokens each (16)")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on (8192)")
    parser.add_argument("--seeds", type=int, default=3, help="weights and calibration texts (3)")
    parser.add_argument("--only", default="", help="variants whose name has this")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
