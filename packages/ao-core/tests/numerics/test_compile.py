"""Tracing: one graph, the same numbers, and shapes without data."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_core.dtypes import CODED_DTYPES, lut_dtype
from ao_core.numerics import (
    choose_qparams,
    dequantize_affine,
    grid_shape,
    pack_bits,
    quantize_affine,
    unpack_bits,
)
from ao_core.records import DType

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}
WIDE = lut_dtype("codebook8", [v / 100 for v in range(-128, 128)])


def round_trip(x: torch.Tensor, dtype: DType, block, zero_point, scale_dtype, mx_mode="floor"):
    scale, point = choose_qparams(x, dtype, block, zero_point, scale_dtype, mx_mode=mx_mode)
    codes = quantize_affine(x, dtype, block, scale, point)
    stored = unpack_bits(pack_bits(codes, dtype.bits), dtype.bits, x.shape[-1])
    return stored, scale.float(), dequantize_affine(stored, dtype, block, scale, point)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block", "zero_point", "scale_dtype", "mx_mode"),
    [
        ("int3", (1, 24), "none", "bfloat16", "floor"),  # ragged
        ("uint4", (1, 32), "int", "float16", "floor"),
        ("f8e4m3", (1, -1), "none", "float32", "floor"),
        ("f6e2m3", (1, 32), "none", "e8m0", "even"),
        ("f4e2m1", (1, 16), "none", "e4m3", "floor"),
        ("nf4", (-1, 32), "float", "float32", "floor"),
        ("codebook8", (1, 32), "none", "e8m0", "rceil"),
        ("f8e4m3", (16, 40), "none", "float32", "floor"),  # ragged, one row of blocks
    ],
)
def test_one_graph_with_the_same_numbers(name, block, zero_point, scale_dtype, mx_mode):
    torch._dynamo.reset()
    dtype = WIDE if name == WIDE.name else DTYPES[name]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return round_trip(x, dtype, block, zero_point, scale_dtype, mx_mode)

    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(function, fullgraph=True)
    for got, expected in zip(compiled(x), function(x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 4])
def test_ragged_packing_compiles(bits: int):
    torch._dynamo.reset()
    codes = torch.randint(0, 1 << bits, (5, 61), dtype=torch.uint8)
    packed = torch.compile(lambda c: pack_bits(c, bits), fullgraph=True)(codes)
    assert torch.equal(packed, pack_bits(codes, bits))
    unpacked = torch.compile(lambda p: unpack_bits(p, bits, 61).float() + 1, fullgraph=True)(packed)
    assert torch.equal(unpacked, codes.float() + 1)


@pytest.mark.parametrize("dtype", CODED_DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("zero_point", ["none", "float"])
@pytest.mark.parametrize("scale_dtype", ["float32", "e8m0", "e4m3"])
def test_fake_and_meta_tensors(dtype: DType, zero_point: str, scale_dtype: str):
    with FakeTensorMode():
        fake = round_trip(torch.randn(6, 50), dtype, (1, 16), zero_point, scale_dtype, "even")
    meta = round_trip(torch.randn(6, 50, device="meta"), dtype, (1, 16), zero_point, scale_dtype)
    for codes, scale, approx in (fake, meta):
        assert codes.shape == approx.shape == (6, 50)
        assert scale.shape == grid_shape((6, 50), (1, 16))
        assert (codes.dtype, approx.dtype) == (torch.uint8, torch.float32)
