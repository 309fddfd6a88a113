"""Weights on a trellis in Triton's interpreter: the bits of the layout's values, and matmuls beside float64.

The interpreter's bfloat16 is wrong, so activations are in float16.
"""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Call, QTensor, Spec, quantize_tensor
from ao_core.ext import registry
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared.known_answer import answer
from ao_kernels.triton.trellis import op, records
from ao_kernels.triton.trellis.records import trellis_dequantize, trellis_linear

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

BITS = (2, 3, 4)
#: a ring and part of one, columns that tiles do not divide; less than a tile
SHAPES = ((140, 35), (16, 5))


def weight(bits: int, shape: tuple[int, int], scale: str = "bfloat16") -> QTensor:
    options = (("scale_rule", "absmean"),)
    spec = Spec(f"int{bits}", (1, WHOLE), scale, layout="trellis", options=options)
    return quantize_tensor(gaussian(shape), spec)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_dense_values_have_the_bits_of_the_layout(bits, shape):
    for scale, dtype in (("float32", torch.float32), ("float16", torch.float16)):
        w = weight(bits, shape, scale)
        found = trellis_dequantize(w.parts, w.spec, shape, dtype)
        assert torch.equal(
            found,
            registry.layouts.get("trellis").decode(
                w.parts, w.spec, shape, registry.dtypes.get(w.spec.dtype), dtype
            ),
        )


@pytest.mark.parametrize(("rows", "shape"), [(1, (140, 70)), (17, (16, 5))])
@pytest.mark.parametrize("bits", BITS)
def test_matmul(bits, rows, shape):
    w, x, bias = weight(bits, shape), gaussian((rows, shape[1])).half(), gaussian(shape[:1]).half()
    expected = x.double() @ w.dequantize(torch.float32).double().t()
    for b in (None, bias):
        found = trellis_linear(x, w, b)
        wanted = expected if b is None else expected + b
        assert found.shape == (rows, shape[0])
        assert float((found - wanted).abs().max()) <= 2e-3 * float(wanted.abs().max())


def test_slices_and_rows_of_no_number():
    """Cut along both axes, and activations of any stride and rank."""
    w = weight(2, (256, 96))
    cut, x = w[128:, 32:], gaussian((64, 3)).half().t()
    expected = x.double() @ w.dequantize(torch.float32)[128:, 32:].double().t()
    torch.testing.assert_close(
        trellis_linear(x, cut, None).double(), expected, rtol=2e-3, atol=0.02
    )
    assert trellis_linear(x[None, :0], cut, None).shape == (1, 0, 128)


def test_custom_ops():
    """Schemas and fake implementations, for `torch.compile`."""
    w = weight(3, (140, 20))
    dense = torch.library.opcheck(op.dequantize, (w.qdata, w.scale, 3, 140, 20, torch.float32))
    x = gaussian((2, 20)).half()
    matmul = torch.library.opcheck(op.linear, (x, w.qdata, w.scale, None, 3, 140))
    assert set(dense.values()) | set(matmul.values()) == {"SUCCESS"}, (dense, matmul)


def test_known_answers():
    """What a device is asked before the first call."""
    spec = weight(2, SHAPES[1]).spec
    for name, fn, sample in (
        ("linear", trellis_linear, records._linear_sample),
        ("dequantize", trellis_dequantize, records._dequantize_sample),
    ):
        call = Call(name, spec, (4096, 4096), (3, 4096), torch.float16, "cuda")
        assert answer(name, fn, sample(call), torch.device("cpu")) is None


def test_the_kernels_of_the_table_are_these():
    assert registry.kernels.get("triton_trellis_linear").fn is trellis_linear
    assert registry.kernels.get("triton_trellis_dequantize").fn is trellis_dequantize
