"""Measure what recipes cost five models, and what remains of their size."""

from __future__ import annotations

import torch
from advice import figures
from advice.loss import answers, loss, nbytes, quantized
from advice.subjects import SUBJECTS
from tqdm import tqdm

from ao_core import Config
from ao_core.ext import AoError, ConfigLike
from ao_quant import Int4WeightOnlyConfig, NF4WeightOnlyConfig

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
    path = figures.parser(__doc__).parse_args().json
    found = figures.read(path, "models", {})
    for name in tqdm(SUBJECTS):
        model = found["models"].setdefault(name, {"rows": {}})
        if not (left := [recipe for recipe in RECIPES if recipe not in model["rows"]]):
            continue
        subject = SUBJECTS[name]()
        right = answers(subject.model, subject.held_out)
        model |= {"measure": subject.measure, "bytes": nbytes(subject.model)}
        for recipe in tqdm(left, desc=name, leave=False):
            try:
                made = quantized(subject, RECIPES[recipe])
                row = {"bytes": nbytes(made), **loss(subject, right, made)._asdict()}
            except AoError as error:
                row = {"left_out": str(error)}
            model["rows"][recipe] = row
            figures.write(path, found)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
