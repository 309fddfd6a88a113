"""A row of activations with NaN or inf leaves the other rows of its batch what they are without it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ao_core
import ao_quant
from ao_core import QTensor

#: with one scale for the activations of a call: that of the others where one is lost
_SHARED = (
    "float8_dynamic_activation_float8_weight/tensor",
    "nvfp4_dynamic_activation_nvfp4_weight",
)
_RECIPES = [r.name for r in ao_quant.recipes.RECIPES if "static" not in r.name]


@pytest.mark.parametrize("band", ["best", "reference"])
@pytest.mark.parametrize("recipe", _RECIPES)
def test_rows_that_are_not_finite_spoil_no_others(recipe: str, band: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)
    layer.weight.data = torch.randn(64, 256, generator=generator).bfloat16()
    ao_core.quantize_(layer, recipe)
    weight = layer.weight
    assert isinstance(weight, QTensor)
    pin = contextlib.nullcontext() if band == "best" else ao_core.kernels("reference")
    with pin, torch.no_grad():
        for rows in (1, 5, 40):
            x = torch.randn(rows, 256, generator=generator).bfloat16()
            row, without = rows // 2, x.clone()
            if recipe in _SHARED:
                without[row] = 0
            alone = F.linear(without, weight)
            for value in (torch.inf, -torch.inf, torch.nan):
                spoilt = x.clone()
                spoilt[row, 3] = value
                out = F.linear(spoilt, weight)
                assert not out[row].isfinite().any()
                others = [i for i in range(rows) if i != row]
                assert torch.equal(out[others], alone[others])
