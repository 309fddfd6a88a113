"""Measure what every recipe costs SmolLM2-135M, with weights off the grid of the file they come in.

Prints a table in Markdown, which scripts/generate_quality.py writes into docs/quality.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from smollm2 import evaluate, model
from torch import Tensor, nn
from tqdm import tqdm

from ao_core import Config, FqnToConfig, QTensor, WeightOnlyConfig, quantize_
from ao_core.ext import AoError, registry
from ao_quant import (
    Int4WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    NF4WeightOnlyConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from minilm_demo import results

from generate_quality import smollm2_sections

_G32 = "int4_weight_only/g32-asymmetric"
#: choices of a user's that no recipe is, by what the table calls them
OTHERS: dict[str, Config] = {
    f"{_G32}, head named": FqnToConfig({"lm_head": _G32, "*": _G32}),
    "int4_weight_only, head named": FqnToConfig(
        dict.fromkeys(("lm_head", "*"), "int4_weight_only")
    ),
    f"{_G32}, zero_point='float'": Int4WeightOnlyConfig(32, zero_point="float"),
    f"{_G32}, scale_method='hqq'": Int4WeightOnlyConfig(32, scale_method="hqq"),
    f"{_G32}, scale_method='mse'": Int4WeightOnlyConfig(32, scale_method="mse"),
    "int4_weight_only, scale_method='mse'": Int4WeightOnlyConfig(128, scale_method="mse"),
    "intx_weight_only/3bit, scale_method='mse'": IntxWeightOnlyConfig(3, 32, scale_method="mse"),
    "nf4_weight_only, double_quant=False": NF4WeightOnlyConfig(double_quant=False),
    "nf4_weight_only, double_quant=False, scale_method='mse'": WeightOnlyConfig(
        "nf4", 64, scale_method="mse"
    ),
    "int4_weight_only/g128-symmetric, scale_method='mse'": Int4WeightOnlyConfig(
        symmetric=True, scale_method="mse"
    ),
    "mx_dynamic_activation_mx_weight, scaling_mode='floor'": MXDynamicActivationMXWeightConfig(
        scaling_mode="floor"
    ),
}


def main() -> None:
    args = parse_args()
    windows = evaluate.spread(model.tokens(evaluate.text()), args.windows)
    original = model.off_grid(model.load())
    logs = evaluate.predict(original, windows)
    names = [n for n in (*registry.recipes.names(), *OTHERS) if re.search(args.only, n)]
    about = results.environment() | {
        "tokens": windows.numel(),
        "context": evaluate.CONTEXT,
        "model": model.path().name,
    }
    data: dict[str, Any] = {"about": about, "rows": [], "left_out": {}}
    if args.resume:
        data = json.loads(args.json.read_text(encoding="utf-8"))
    else:
        data["rows"].append(row(original, "float32", None, logs, windows))
    done = {found["name"] for found in data["rows"]} | data["left_out"].keys()
    for name in tqdm([name for name in names if name not in done], desc="SmolLM2"):
        config = OTHERS.get(name) or registry.recipes.get(name).config
        found = row(original, name, config, logs, windows)
        if isinstance(found, str):
            data["left_out"][name] = found
        else:
            data["rows"].append(found)
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for name, text in smollm2_sections(data).items():
        print(f"## {name}\n\n{text}\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--resume", action="store_true", help="keep what the file has already")
    parser.add_argument("--windows", type=int, default=4, help="of text (4)")
    parser.add_argument("--only", default="", help="names in which this regex is found")
    return parser.parse_args()


def row(
    original: nn.Module,
    name: str,
    config: Config | None,
    logs: list[Tensor],
    windows: Tensor,
) -> dict[str, Any] | str:
    """The figures of one variant, or why it has none."""
    made, start = model.share(original), time.process_time()
    if config is not None:
        try:
            quantize_(made, config)
        except AoError as error:
            return f"does not apply here: {error}"
        if not any(isinstance(parameter, QTensor) for parameter in made.parameters()):
            return "a recipe for training: its weights stay in high precision"
    seconds = time.process_time() - start
    found = evaluate.quality(logs, windows, partial(evaluate.predict, made))
    figures = {key: float(f"{value:.6g}") for key, value in asdict(found).items()}
    size = sum(bytes_of(parameter) for parameter in made.parameters())
    return {"name": name, "bytes": size, "seconds": round(seconds, 2)} | figures


def bytes_of(parameter: Tensor) -> int:
    """What is stored of a parameter."""
    return parameter.stored_bytes if isinstance(parameter, QTensor) else parameter.nbytes


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
