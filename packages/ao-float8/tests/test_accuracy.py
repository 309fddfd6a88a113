"""Matmuls of random layers against float32 autograd; any sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import quantize_
from ao_float8 import Float8LinearConfig, Float8Matmul
from ao_float8.config import PRESETS

#: recipe -> least and greatest SQNR in dB of the output and of the gradients. Both operands of e4m3
#: have noise of 31.5 dB, so a matmul 28.6; with a gradient in e5m2 (25.6) 24.6; float4 and ternary
#: by measurement.
BOUNDS = {
    "float8/tensorwise": ((25, 31), (22, 27), (22, 27)),
    "float8/rowwise": ((25, 31), (25, 31), (25, 31)),
    "float8/rowwise_with_gw_hp": ((25, 31), (25, 31), (50, 60)),
    "float8/blockwise": ((25, 31), (25, 31), (25, 31)),
    "float8/mxfp8": ((25, 31), (25, 31), (25, 31)),
    "int8_mixed_precision_training": ((38, 46), (38, 46), (38, 46)),
    "int8_weight_only_training": ((42, 52), (42, 52), (50, 60)),
    "bitnet_training": ((5, 11), (5, 11), (38, 48)),
    "mx_training/mxfp4": ((13, 19), (13, 19), (13, 19)),
    "mx_training/mxfp6": ((25, 31), (22, 27), (22, 27)),
    "nvfp4_training": ((15, 20), (15, 20), (15, 20)),
}
SIZES = [(70, 33, 19), (129, 257, 300)]


@pytest.mark.parametrize(("k", "n", "rows"), SIZES)
@pytest.mark.parametrize("recipe", BOUNDS)
def test_products_are_as_exact_as_the_format(recipe, k, n, rows, decibels):
    for found, (least, greatest) in zip(decibels(recipe, k, n, rows), BOUNDS[recipe], strict=True):
        assert least <= found <= greatest


@pytest.mark.parametrize("name", PRESETS)
def test_power_of_two_scales_cost_little(name, decibels):
    config = Float8LinearConfig.from_recipe_name(name, power_of_two_scales=True)
    for found in decibels(config, 200, 136, 72):
        assert 22 <= found <= 60


def test_each_product_by_itself(decibels):
    config = Float8LinearConfig(None, Float8Matmul("row", a="e5m2"), Float8Matmul("block"))
    exact, e5m2, e4m3 = decibels(config, 200, 136, 72)
    assert 50 <= exact <= 60
    assert 22 <= e5m2 <= 27
    assert 25 <= e4m3 <= 31


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("recipe", BOUNDS)
def test_what_is_not_finite_stays_so(recipe, bad, run):
    """In the input and in the gradient; never a zero or a finite number in its place."""
    layer = nn.Linear(70, 33, bias=False, dtype=torch.bfloat16)
    quantize_(layer, recipe)
    for where in ("input", "grad"):
        x = torch.randn(19, 70, dtype=torch.bfloat16)
        grad = torch.randn(19, 33, dtype=torch.bfloat16)
        (x if where == "input" else grad)[3, 5] = bad
        out, grad_x, grad_w = run(layer, x, grad)
        reached = (out[3], grad_w[:, 5]) if where == "input" else (grad_x[3], grad_w[5])
        for part in reached:
            # integers may multiply an infinity with a zero, and that is all that it loses
            count = (~part.isfinite()).sum()
            assert count == len(part) if bad != bad else count > len(part) / 2
