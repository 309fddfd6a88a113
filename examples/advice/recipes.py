"""Measure what recipes cost five models, and what remains of their size."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from advice.loss import answers, loss, nbytes, quantized
from advice.subjects import SUBJECTS
from tqdm import tqdm

from ao_core import Config
from ao_core.ext import AoError, ConfigLike
from ao_quant import Int4WeightOnlyConfig, NF4WeightOnlyConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo.results import environment

_G32 = "int4_weight_only/g32-asymmetric"
#: what the table calls them -> what is applied
RECIPES: dict[str, ConfigLike] = {
    name: name
    for name in (
        "int8_weight_only",
        "mx_weight_only/mxint8",
        "float8_weight_only",
        "mx_weight_only/mxfp6",
        "intx_weight_only",
        "nvfp4_weight_only",
        _G32,
        "int4_weight_only",
        "int4_weight_only/g128-symmetric",
        "fp4_weight_only",
        "nf4_weight_only",
        "mx_weight_only",
        "codebook_weight_only",
        "gguf_weight_only",
        "intx_weight_only/3bit",
        "intx_weight_only/2bit",
        "int8_dynamic_activation_int8_weight",
        "int8_dynamic_activation_int8_weight/asymmetric",
        "float8_dynamic_activation_float8_weight",
        "mx_dynamic_activation_mx_weight",
        "int8_dynamic_activation_intx_weight",
        "int8_dynamic_activation_int4_weight",
        "nvfp4_dynamic_activation_nvfp4_weight",
        "mx_dynamic_activation_mx_weight/mxfp4",
    )
}
_OTHERS: dict[str, Config] = {
    f"{_G32}, scale_method='mse'": Int4WeightOnlyConfig(32, scale_method="mse"),
    f"{_G32}, scale_method='hqq'": Int4WeightOnlyConfig(32, scale_method="hqq"),
    "int4_weight_only, scale_method='mse'": Int4WeightOnlyConfig(128, scale_method="mse"),
    "int4_weight_only, scale_method='hqq'": Int4WeightOnlyConfig(128, scale_method="hqq"),
    "nf4_weight_only, double_quant=False": NF4WeightOnlyConfig(double_quant=False),
    f"{_G32}, zero_point='float'": Int4WeightOnlyConfig(32, zero_point="float"),
}
RECIPES |= _OTHERS


def main() -> None:
    args = parse_args()
    found: dict[str, Any] = {"about": environment(), "models": {}}
    if args.json.exists():
        found["models"] = json.loads(args.json.read_text(encoding="utf-8"))["models"]
    for name in tqdm(SUBJECTS):
        figures = found["models"].setdefault(name, {"rows": {}})
        if not (left := [recipe for recipe in RECIPES if recipe not in figures["rows"]]):
            continue
        subject = SUBJECTS[name]()
        right = answers(subject.model, subject.held_out)
        figures |= {"measure": subject.measure, "bytes": nbytes(subject.model)}
        for recipe in tqdm(left, desc=name, leave=False):
            try:
                made = quantized(subject, RECIPES[recipe])
                row = {"bytes": nbytes(made), **loss(subject, right, made)._asdict()}
            except AoError as error:
                row = {"left_out": str(error)}
            figures["rows"][recipe] = row
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
