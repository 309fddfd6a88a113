"""The kernels of `plane16` in Triton's interpreter, on ragged shapes, against float64.

The interpreter has no inline assembly, whose twins in plain operations run here, and its bfloat16 is
wrong, so activations are in float16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from ao_core import WHOLE, Spec
from ao_core.numerics import full_block
from ao_core.registry import registry
from ao_core.tensor import QTensor, quantize_tensor
from ao_core.tensor.relayout import to_layout
from ao_core.testing.base import gaussian
from ao_kernels.triton import ops

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

SPECS = (
    Spec("int4", (1, 128), "float16"),
    Spec("int4", (1, 32), "float32"),
    Spec("int4", (1, 256), "float16"),
    Spec("int4", (1, WHOLE), "float16"),
    Spec("uint4", (1, 64), "float16", "int"),
    Spec("uint4", (1, 32), "float32", "float"),
    Spec("uint4", (1, WHOLE), "float32", "int"),
)
#: rows and columns that tiles do not divide; less than a tile; tiles for several blocks
SHAPES = ((140, 300), (16, 70), (100, 520))


def weight(spec: Spec, shape: tuple[int, int]) -> QTensor:
    packed = replace(spec, layout="packed")
    return to_layout(quantize_tensor(gaussian(shape), packed), "plane16")


def arguments(w: QTensor) -> tuple[object, ...]:
    n, k = w.shape
    return n, k, full_block(w.spec.block, (n, k))[-1]


def test_the_interpreter_runs():
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(spec, shape):
    w = weight(spec, shape)
    n, k, group = arguments(w)
    bias = gaussian((n,), seed=7).half()
    for m, splits in ((0, 1), (1, 1), (3, 2), (17, 2), (70, 1)):
        x = gaussian((m, k), seed=m).half()
        out = ops.launch_linear(
            x, w.qdata, w.scale, w.parts.get("zero"), bias, n, k, group, splits=splits
        )
        expected = x.double() @ w.dequantize(torch.float32).double().t() + bias.double()
        assert (out.shape, out.dtype) == ((m, n), torch.float16)
        assert (out.double() - expected).norm() <= 5e-4 * expected.norm()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dequantize(spec, dtype):
    """Bit for bit what the reference gives."""
    for shape in SHAPES:
        w = weight(spec, shape)
        kernel = registry.kernels.get("triton_plane16_dequantize")
        dense = kernel.fn(w.parts, w.spec, shape, dtype)
        assert torch.equal(dense, to_layout(w, "packed").dequantize(dtype))


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4]], ids=str)
def test_inputs_of_any_rank_and_stride(spec):
    w = weight(spec, (140, 300))
    kernel = registry.kernels.get("triton_plane16_linear").fn
    x = gaussian((2, 3, 300)).half()
    out = kernel(x, w, None)
    assert out.shape == (2, 3, 140)
    assert torch.equal(kernel(x[0, 0], w, None), kernel(x, w, None)[0, 0])
    wider = torch.cat([x, x], -1)[..., 7:307]
    assert torch.equal(kernel(wider, w, None), kernel(wider.contiguous(), w, None))
    strided = x[0].t().contiguous().t()
    assert torch.equal(kernel(strided, w, None), kernel(x[0], w, None))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf * 0
def test_what_is_not_finite_stays_in_its_row():
    w = weight(SPECS[0], (16, 70))
    x = gaussian((3, 70)).half()
    x[1, 69] = torch.inf
    out = registry.kernels.get("triton_plane16_linear").fn(x, w, None)
    finite = out.isfinite().all(-1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize("zero", [None, "int"])
def test_custom_ops(zero):
    """Schema, fake implementations and registration, for `torch.compile`."""
    w = weight(SPECS[4] if zero else SPECS[0], (16, 70))
    x = gaussian((2, 3, 70)).half()
    parts = (w.qdata, w.scale, w.parts.get("zero"))
    for op, args in (
        (torch.ops.ao_kernels.plane16_linear, (x, *parts, None, *arguments(w))),
        (torch.ops.ao_kernels.plane16_dequantize, (*parts, *arguments(w), torch.float32)),
    ):
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}, results
