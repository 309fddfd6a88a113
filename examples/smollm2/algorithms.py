"""What calibrated algorithms cost SmolLM2-135M, compared with rounding to nearest in the same format.

`python algorithms.py --json algorithms.json`. They are calibrated on docstrings of the standard library and
measured on other text, the sections of Python's documentation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from smollm2 import evaluate, model
from tqdm import tqdm

from ao_core import Config, quantize_
from ao_quant import Int4WeightOnlyConfig, UIntxWeightOnlyConfig
from ao_quant.configs import AutoRoundConfig, AWQConfig, BaseConfig, GPTQConfig, ImatrixConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo import corpus, results

FORMATS: dict[str, Config] = {
    "int4 g128": Int4WeightOnlyConfig(128),
    "int4 g32": Int4WeightOnlyConfig(32),
    "int3 g64": UIntxWeightOnlyConfig(3, 64),
    "int2 g64": UIntxWeightOnlyConfig(2, 64),
}
METHODS: dict[str, type[BaseConfig] | None] = {
    "rounding to nearest": None,
    "importance": ImatrixConfig,
    "AWQ": AWQConfig,
    "GPTQ": GPTQConfig,
    "AutoRound": AutoRoundConfig,
}


def main() -> None:
    args = parse_args()
    windows = evaluate.spread(model.tokens(evaluate.text()), args.windows)
    about = results.environment() | {"tokens": windows.numel(), "calibration_tokens": args.tokens}
    data: dict[str, Any] = {"about": about, "rows": []}
    if args.json.exists():
        data["rows"] = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    done = {(row["format"], row["method"], row["seed"]) for row in data["rows"]}
    wanted = [one for one in product(FORMATS, METHODS, range(args.seeds)) if one not in done]
    for name, method, seed in tqdm([one for one in wanted if args.only in " ".join(map(str, one))]):
        original = model.off_grid(model.load(), seed)
        logs = evaluate.predict(original, windows)
        made, start = original, time.perf_counter()
        kind, base = METHODS[method], FORMATS[name]
        made = model.share(original)
        if kind is None:
            quantize_(made, base)
        else:
            quantize_(made, kind(base), data=calibration(args.tokens, seed))
        seconds = time.perf_counter() - start
        found = asdict(evaluate.quality(logs, windows, partial(evaluate.predict, made)))
        row = {"format": name, "method": method, "seed": seed, "seconds": round(seconds, 1)}
        data["rows"].append(row | {key: float(f"{value:.6g}") for key, value in found.items()})
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


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
