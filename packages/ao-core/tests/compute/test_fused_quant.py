"""Activations in codes: what computes them, and the layers that take them as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import WHOLE, Spec
from ao_core.compute import ComputeWeight, linear
from ao_core.compute.fused_quant import rms_norm_quantized, silu_mul_quantized
from ao_core.dispatch import kernels
from ao_core.errors import QuantizationError, UnsupportedOp
from ao_core.tensor import QTensor, quantize_tensor
from ao_core.testing.base import gaussian

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
ACT = Spec("f8e4m3", ROW)
SPEC = Spec("f8e4m3", ROW, act=ACT)


def weight(*specs, shape=(48, 70)):
    return nn.Parameter(ComputeWeight(gaussian(shape, seed=1), *specs))


def norm(x, by):
    return rms_norm_quantized(x, by, ACT, eps=1e-5)


def gate(x, by):
    return silu_mul_quantized(x, by, ACT)


def plain_norm(x, by):
    return F.rms_norm(x, x.shape[-1:], by, 1e-5)


def plain_gate(x, by):
    return F.silu(x) * by


CASES = [
    pytest.param(norm, plain_norm, (70,), id="rms_norm"),
    pytest.param(gate, plain_gate, (2, 5, 70), id="silu_mul"),
]


@pytest.mark.parametrize(("codes", "dense", "shape"), CASES)
def test_gradients_are_those_of_the_function(codes, dense, shape):
    inputs = [gaussian((2, 5, 70)).requires_grad_(), gaussian(shape, seed=2).requires_grad_()]
    out = codes(*inputs)
    assert isinstance(out, QTensor)
    assert (out.shape, out.spec, out.qdata.dtype) == ((2, 5, 70), ACT, torch.float8_e4m3fn)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense(*wide)
    assert (out.dequantize().double() - expected).norm() < 0.05 * expected.norm()
    grad = gaussian((2, 5, 70), seed=3)
    found = torch.autograd.grad(out, inputs, grad)
    for mine, right in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("codes", "dense", "shape"), CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_takes_them_as_they_are(codes, dense, shape, compiled):
    """The output is that of a cast inside; only the codes of the input are kept for backward."""
    by, w, bias = gaussian(shape, seed=2), weight(SPEC, SPEC, SPEC), gaussian((48,), seed=4)

    def run(function, x):
        return F.linear(function(x, by), w, bias)

    x = gaussian((2, 5, 70)).requires_grad_()
    expected = run(dense, x)
    right = torch.autograd.grad(expected.square().sum(), (x, w))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        out = run(codes, x)
    assert (out - expected).norm() < 1e-3 * expected.norm()  # the last place of the mean may differ
    if not compiled:
        assert any(isinstance(each, QTensor) for each in saved)
    found = torch.autograd.grad(out.square().sum(), (x, w))
    assert (found[0] - right[0]).norm() < 1e-2 * right[0].norm()
    # the matmul reads rounded numbers, and rounds them again, down its other dimension
    assert 1e-4 < (found[1] - right[1]).norm() / right[1].norm() < 0.06


def test_a_quantized_layer_takes_them_too():
    x, w = gaussian((3, 5, 70)), quantize_tensor(gaussian((48, 70), seed=1), SPEC)
    codes, bias = norm(x, None), gaussian((48,), seed=4)
    with torch.no_grad(), kernels("reference"):
        expected = codes.dequantize().reshape(15, 70).double() @ w.dequantize().double().t()
        out = F.linear(codes, w)
        assert out.shape == (3, 5, 48)
        assert (out.reshape(15, 48) - expected).norm() < 1e-6 * expected.norm()
        torch.testing.assert_close(F.linear(codes, w, bias), out + bias)
        # another format than it wants: by values
        other = quantize_tensor(gaussian((48, 70), seed=1), Spec("int8", ROW))
        torch.testing.assert_close(F.linear(codes, other), F.linear(codes.dequantize(), other))


def test_both_matmuls_of_the_backward_pass_share_a_cast(monkeypatch):
    """Bit for bit as each by itself, and where they cast alike, from one read."""
    read = []
    cast = linear._cast_both

    def counted(x, spec):
        if spec is not None:
            read.append(spec)
        return cast(x, spec)

    monkeypatch.setattr(linear, "_cast_both", counted)
    x = gaussian((7, 70))
    for specs, times in (((SPEC,) * 3, 1), ((SPEC, SPEC, None), 0), ((None,) * 3, 0)):
        found = []
        for wanted in ((True, True), (True, False), (False, True)):
            leaves = x.clone().requires_grad_(wanted[0]), weight(*specs).requires_grad_(wanted[1])
            F.linear(*leaves).square().sum().backward()
            found.append([leaf.grad for leaf in leaves])
        assert len(read) == times
        both, of_input, of_weight = found
        assert torch.equal(both[0], of_input[0])
        assert torch.equal(both[1], of_weight[1])
        read.clear()


def test_rows_of_codes_are_viewed_in_other_dimensions():
    x = quantize_tensor(gaussian((6, 70)), SPEC)
    turned = x.view(2, 3, 70)
    assert torch.equal(turned.dequantize(), x.dequantize().view(2, 3, 70))
    assert turned.qdata.data_ptr() == x.qdata.data_ptr()
    for other in (quantize_tensor(gaussian((6, 70)), Spec("int8", TENSOR)), x.t()):
        with pytest.raises(UnsupportedOp, match="no block has several"):
            other.view(2, -1, other.shape[-1])


def test_bad_input():
    with pytest.raises(QuantizationError, match="static"):
        rms_norm_quantized(gaussian((2, 70)), None, Spec("int8", TENSOR, static=True))
    with pytest.raises(QuantizationError, match="several rows"):
        silu_mul_quantized(gaussian((2, 3, 70)), gaussian((2, 3, 70)), Spec("int8", TENSOR))
    assert rms_norm_quantized(gaussian((2, 70)), None, Spec("int8", TENSOR)).scale.shape == (1, 1)
