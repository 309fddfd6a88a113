"""Matmuls with weights in tiles where activations are zeros, infinite, or at the ends of float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Call, QTensor, Spec, quantize_tensor
from ao_core.ext import to_layout
from ao_core.ext.kernels import select

ROW = (1, WHOLE)
#: weights with and without zero points, in codes and in tables
SPECS = (
    Spec("int4", (1, 32), "bfloat16"),
    Spec("uint4", (1, 32), "bfloat16", "int"),
    Spec("uint3", (1, 96), "float16", "float"),
    Spec("uint5", (1, 32), "float16", "offset"),
    Spec("nf4", (1, 64)),
)
#: rows of activations: each way to use registers
ROWS = (1, 3, 40)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tiled(spec: Spec, weight: Tensor) -> QTensor:
    layouts = ("plain", "cpu_tiles8") if spec.dtype == "int8" else ("packed", "cpu_tiles")
    return to_layout(quantize_tensor(weight, replace(spec, layout=layouts[0])), layouts[1])


def served(x: Tensor, w: QTensor) -> Tensor:
    """The matmul, surely by the kernel under test."""
    call = Call("linear", w.spec, tuple(w.shape), tuple(x.shape), x.dtype, "cpu")
    assert select(call).name == f"{w.spec.layout}_linear"
    return F.linear(x, w)


def dense(x: Tensor, w: QTensor) -> Tensor:
    """The matmul of the weight's own values, in float64."""
    return F.linear(x.double(), w.canonical().dequantize(torch.float32).double())


@pytest.mark.parametrize("weight", ["int8", "int4"])
@pytest.mark.parametrize("columns", [188, 581, 1100])
def test_a_token_of_zeros_makes_zeros(weight: str, columns: int) -> None:
    """Where activations have zero points, what these add to float32 sums is not left over."""
    block = ROW if weight == "int8" else (1, 32)
    spec = Spec(weight, block, act=Spec("uint8", ROW, zero_point="int"))
    w = tiled(spec, randn(130, columns))
    for m in ROWS:
        x = randn(m, columns)
        x[m // 2] = 0
        out = served(x, w)
        assert not out[m // 2].any()
        assert m == 1 or out.any(1).sum() == m - 1


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_infinity_spreads_as_in_the_dense_matmul(spec: Spec, dtype: torch.dtype) -> None:
    """What zero points take off is no infinity less another one: only a weight of 0 makes NaN."""
    weight = randn(37, 192)
    weight[5, 64:128] = 0
    w = tiled(spec, weight)
    for m in ROWS:
        x = randn(m, 192).to(dtype)
        clean = served(x, w)
        for value in (torch.inf, -torch.inf):
            dirty = x.clone()
            dirty[m // 2, 70] = value
            out, expected = served(dirty, w)[m // 2], dense(dirty, w)[m // 2]
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=0, equal_nan=True)
            others = [i for i in range(m) if i != m // 2]
            assert torch.equal(served(dirty, w)[others], clean[others])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "scale"), [(2.0**125, 2.0**-20), (2.0**-135, 2.0**60)])
def test_sums_do_not_leave_float32(
    spec: Spec, dtype: torch.dtype, size: float, scale: float
) -> None:
    """Codes times activations would exceed float32, or fall below it, before scales bring them back."""
    w = tiled(spec, randn(40, 256) * scale)
    for m in ROWS:
        x = (randn(m, 256).clamp(-4, 4) * size).to(dtype)
        out, expected = served(x, w).double(), dense(x, w)
        assert out.isfinite().all()
        error = float((out - expected).norm() / expected.norm())
        assert error <= (1e-6 if dtype == torch.float32 else 4e-3), (m, error)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.dtype != "nf4"], ids=str)
def test_tiny_activations_bring_huge_weights_back(spec: Spec) -> None:
    """Sums of codes times scales are beyond float32 on their way; other rows of the weight are small."""
    greatest = (
        1e4 if "float16" in str(spec.scale_dtype) and "b" not in str(spec.scale_dtype) else 1e37
    )
    weight = randn(37, 192)
    weight[::2] *= greatest
    w = tiled(spec, weight)
    for m in (3, 12, 40):
        x = (randn(m, 192) / greatest).bfloat16()
        out, expected = served(x, w), dense(x, w)
        size = F.linear(
            x.double().square(), w.canonical().dequantize(torch.float32).double().square()
        )
        # subnormal activations, of which some processors take the least for 0, lose bits
        allowed = 2.0**-6 * size.sqrt() + 2.0**-126 * expected.abs().amax() / x.abs().amax()
        assert ((out.double() - expected).abs() <= allowed).all()
