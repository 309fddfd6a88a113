"""Weights next to the greatest float: what can be quantized stays finite, and the rest is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ao_core
import ao_quant
from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import QuantizationError

_RECIPES = [r.name for r in ao_quant.recipes.RECIPES if "static" not in r.name]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _layer(dtype: torch.dtype, share: float) -> nn.Linear:
    layer = nn.Linear(256, 16, bias=False, dtype=dtype)
    values = torch.rand(16, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values[0, 0], values[1, 1] = 1.0, -1.0
    layer.weight.data = (values * (share * torch.finfo(dtype).max)).to(dtype)
    return layer


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("recipe", _RECIPES)
def test_up_to_half_of_the_greatest_float_all_stays_finite(recipe: str, dtype: torch.dtype) -> None:
    layer = _layer(dtype, 0.5)
    ao_core.quantize_(layer, recipe)
    assert isinstance(layer.weight, QTensor)
    assert layer.weight.dequantize().isfinite().all()


@pytest.mark.parametrize("share", [0.51, 0.99, 1.0])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_beyond_it_is_refused(dtype: torch.dtype, share: float) -> None:
    layer = _layer(dtype, share)
    with pytest.raises(QuantizationError, match="weight has values up to .* half of what"):
        ao_core.quantize_(layer, "int4_weight_only")
    assert not isinstance(layer.weight, QTensor)
    weight = quantize_tensor(torch.zeros(16, 256, dtype=dtype), Spec("int8", (1, WHOLE)))
    with pytest.raises(QuantizationError, match="half of what"):
        weight.copy_(layer.weight)
    assert not weight.dequantize().any()
