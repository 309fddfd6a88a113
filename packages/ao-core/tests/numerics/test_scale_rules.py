"""What a scale follows when it is not the largest magnitude at the format's `quant_max`."""

from __future__ import annotations

import pytest
import torch

from ao_core.dtypes import CODED_DTYPES
from ao_core.errors import ConfigError
from ao_core.numerics import block_absmax, choose_qparams, dequantize_affine, quantize_affine
from ao_core.spec import WHOLE

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16", "e4m3"])
def test_the_mean_magnitude_as_scale(scale_dtype: str):
    """BitNet b1.58: round and clip x / mean |x|; a block of zeros has scale 1."""
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    x[2, :32] = 0
    scale, zero_point = choose_qparams(
        x, DTYPES["ternary"], (1, 32), "none", scale_dtype, rule="absmean"
    )
    assert zero_point is None
    mean = x.double().abs().reshape(6, 3, 32).mean(-1)
    mean[2, 0] = 1
    torch.testing.assert_close(
        scale.double(), mean, rtol=0.07 if scale_dtype == "e4m3" else 5e-3, atol=0
    )
    codes = quantize_affine(x, DTYPES["ternary"], (1, 32), scale)
    ratio = x.double() / scale.double().repeat_interleave(32, 1)
    assert torch.equal(codes.double() - 1, ratio.round().clamp(-1, 1))


@pytest.mark.parametrize("dtype", ["int8", "int4", "f8e4m3"])
@pytest.mark.parametrize("block", [(1, WHOLE), (WHOLE, WHOLE), (1, 32)], ids=str)
def test_the_greatest_value_as_reach(dtype: str, block: tuple[int, ...]):
    """The largest magnitude of a block of any size is exact."""
    x, fmt = torch.randn(6, 4096, generator=torch.Generator().manual_seed(0)), DTYPES[dtype]
    scale, _ = choose_qparams(x, fmt, block, "none", rule="greatest")
    greatest = block_absmax(x, block)
    torch.testing.assert_close(scale * fmt.max, greatest)
    found = dequantize_affine(quantize_affine(x, fmt, block, scale), fmt, block, scale)
    torch.testing.assert_close(block_absmax(found, block), greatest)


def test_rules_for_scales_are_checked():
    x, ternary = torch.ones(2, 4), DTYPES["ternary"]
    with pytest.raises(
        ConfigError, match="scale_rule='median' is unknown; use one of absmax, greatest, absm"
    ):
        choose_qparams(x, ternary, (1, 4), rule="median")
    with pytest.raises(
        ConfigError, match="zero_point='float' and scale_dtype='float32' is not defined"
    ):
        choose_qparams(x, ternary, (1, 4), "float", rule="absmean")
    with pytest.raises(
        ConfigError, match="use zero_point='none' and a scale in another dtype than e8m0"
    ):
        choose_qparams(x, ternary, (1, 4), scale_dtype="e8m0", rule="absmean")
