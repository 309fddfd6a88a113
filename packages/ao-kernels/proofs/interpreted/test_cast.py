"""The casts to float8 in Triton's interpreter, on ragged shapes, bit for bit those of the reference."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import encode_reference
from ao_core.ext.numerics import quantize_affine
from ao_core.testing.base import gaussian
from ao_kernels.triton.cast.op import cast_dual
from ao_kernels.triton.cast.records import quantize_both, quantize_plain

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

BLOCKS = {"tensor": (WHOLE, WHOLE), "row": (1, WHOLE), "block": (1, 128)}
#: less than a tile, ragged both ways, more tiles than a block casts
SHAPES = ((3, 5), (140, 170), (516, 130))


def hard(shape, dtype):
    """Numbers of all sizes: some rows are zeros, tiny, infinite or not numbers."""
    x = gaussian(shape) * torch.exp2(gaussian(shape, seed=1) * 4)
    x[0], x[1, 1::2] = 0.0, -0.0
    if shape[0] > 8:
        x[2] *= 1e-42
        x[3] *= 1e-30
        x[4, 7], x[5, 3] = torch.inf, -torch.inf
        x[6, 11] = torch.nan
        x[:, 9] = 0.0
        x[7] = 2.0**-14
    return x.to(dtype)


def same(codes, scale, expected):
    """Equal bits, but for the sign of NaN."""
    assert torch.equal(scale.nan_to_num(-1), expected["scale"].nan_to_num(-1))
    found, wanted = codes.float(), expected["qdata"].float()
    assert torch.equal(found.isnan(), wanted.isnan())
    number = ~found.isnan()
    bits = (each.contiguous().view(torch.uint8)[number] for each in (codes, expected["qdata"]))
    assert torch.equal(*bits)


@pytest.mark.parametrize(
    ("numbers", "scales", "shape", "dtype"),
    [
        *(
            (numbers, scales, SHAPES[0], torch.float32)
            for numbers in ("f8e4m3", "f8e5m2")
            for scales in BLOCKS
        ),
        *(("f8e4m3", scales, SHAPES[1], torch.float32) for scales in BLOCKS),
        ("f8e5m2", "row", SHAPES[2], torch.float16),
        pytest.param("f8e5m2", "block", SHAPES[2], torch.float16, marks=pytest.mark.slow),
    ],
)
def test_both_casts(numbers, scales, shape, dtype):
    x, spec = hard(shape, dtype), Spec(numbers, BLOCKS[scales])
    if scales == "tensor":
        x = x.nan_to_num(1.0, 3.0, -3.0)
    codes, scale, codes_t, scale_t = cast_dual(x, numbers, scales)
    assert codes_t.stride(0) % 16 == 0
    same(codes, scale, encode_reference(x, spec))
    same(codes_t, scale_t, encode_reference(x.t(), spec))


@pytest.mark.parametrize("numbers", ["f8e4m3", "f8e5m2"])
def test_a_scale_that_is_given(numbers):
    x, scale = hard((140, 70), torch.float32), torch.tensor([[0.037]])
    codes, by, codes_t, by_t = cast_dual(x, numbers, "given", scale)
    assert by.item() == by_t.item() == scale.item()
    dtype = registry.dtypes.get(numbers)
    for found, dense in ((codes, x), (codes_t, x.t())):
        expected = quantize_affine(dense.contiguous(), dtype, (WHOLE, WHOLE), scale)
        same(found, by, {"scale": scale, "qdata": expected.view(dtype.storage)})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_tensor_with_one_that_is_no_number(value):
    x = gaussian((20, 33))
    x[19, 32] = value
    codes, scale, codes_t, scale_t = cast_dual(x, "f8e4m3", "tensor")
    same(codes, scale, encode_reference(x, Spec("f8e4m3", BLOCKS["tensor"])))
    same(codes_t, scale_t, encode_reference(x.t(), Spec("f8e4m3", BLOCKS["tensor"])))


def test_both_casts_as_the_op_of_the_table():
    x, spec = gaussian((20, 33)), Spec("f8e5m2", BLOCKS["row"])
    for parts, dense in zip(quantize_both(x, spec), (x, x.t()), strict=True):
        same(parts["qdata"], parts["scale"], encode_reference(dense, spec))


@pytest.mark.parametrize("scales", BLOCKS)
def test_one_cast(scales):
    """As the op "quantize" has it, of a matrix that is not contiguous."""
    x, spec = hard((140, 100), torch.float16).t(), Spec("f8e4m3", BLOCKS[scales])
    parts = quantize_plain(x, spec)
    same(parts["qdata"], parts["scale"], encode_reference(x, spec))
