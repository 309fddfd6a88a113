"""`nn.Linear` in every recipe and any shape, against the matmul of the stored values in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import kernels, quantize_
from ao_core.ext import fake_quantize

#: (out, in): square, odd, ragged with respect to every group, narrower than a group, single
SHAPES = [(64, 128), (33, 77), (7, 129), (48, 300), (5, 3), (1, 1)]


def _quantized(recipe, out, inp, bias=True, dtype=torch.float32):
    layer = nn.Linear(inp, out, bias=bias, dtype=dtype)
    (record, *_) = quantize_(layer, recipe)
    assert record.status == "changed"
    return layer


def _expected(layer, x):
    w = layer.weight
    if w.spec.act is not None:
        # blocks of activations are those of the matrix (tokens, in)
        x = fake_quantize(x.reshape(-1, x.shape[-1]), w.spec.act).reshape(x.shape)
    y = x.double() @ w.dequantize(torch.float64).t()
    return y if layer.bias is None else y + layer.bias.double()


def _close(actual, expected, layer, x):
    assert actual.shape == expected.shape
    # rounding of a sum is bounded by the sum of magnitudes, not by the result
    scale = x.double().abs() @ layer.weight.dequantize(torch.float64).abs().t() + 1e-6
    return bool(((actual.double() - expected).abs() <= 3e-6 * scale + 1e-6).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_dimensional_input(recipe, shape):
    layer = _quantized(recipe, *shape)
    for m in (0, 1, 5, 33):
        x = torch.randn(m, shape[1])
        with torch.no_grad():
            actual = layer(x)
        assert actual.dtype == torch.float32
        assert _close(actual, _expected(layer, x), layer, x), m


def test_input_of_other_ranks(recipe):
    layer = _quantized(recipe, 33, 77, bias=False)
    for lead in ((), (2, 3), (1, 2, 3), (2, 0, 3)):
        x = torch.randn(*lead, 77)
        with torch.no_grad():
            assert _close(layer(x), _expected(layer, x), layer, x), lead


def test_inference_mode_and_autograd_agree(recipe):
    layer = _quantized(recipe, 33, 77)
    x = torch.randn(5, 77)
    with torch.no_grad():
        plain = layer(x)
    with torch.inference_mode():
        inference = layer(x)
    with_grad = layer(x.clone().requires_grad_())
    assert torch.equal(plain, inference)
    assert torch.equal(plain, with_grad.detach())


def test_non_contiguous_input(recipe):
    layer = _quantized(recipe, 33, 77)
    x = torch.randn(77, 6).t()[::2]
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(recipe, dtype, sqnr_db):
    layer = _quantized(recipe, 33, 77, dtype=dtype)
    x = torch.randn(9, 77, dtype=dtype)
    with torch.no_grad():
        actual = layer(x)
    assert actual.dtype == dtype
    assert sqnr_db(_expected(layer, x), actual) > 40


def test_the_chosen_kernel_agrees_with_the_reference(recipe):
    layer = _quantized(recipe, 48, 256)
    x = torch.randn(5, 256)
    with torch.no_grad():
        chosen = layer(x)
        with kernels("reference"):
            reference = layer(x)
    torch.testing.assert_close(chosen, reference, rtol=1e-4, atol=1e-4)


def test_input_and_bias_gradients(recipe):
    layer = _quantized(recipe, 33, 77)
    x = torch.randn(2, 5, 77, requires_grad=True)
    g = torch.randn(2, 5, 33)
    layer(x).backward(g)
    torch.testing.assert_close(x.grad, g @ layer.weight.dequantize(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, g.sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert layer.weight.grad is None


def test_gradients_through_a_frozen_layer_reach_an_adapter(recipe):
    layer = _quantized(recipe, 16, 32).requires_grad_(False)
    down, up = nn.Linear(32, 2, bias=False), nn.Linear(2, 16, bias=False)
    x = torch.randn(3, 32)
    first = down(x)
    (layer(nn.functional.pad(first, (0, 30))) + up(first)).square().sum().backward()
    assert down.weight.grad.abs().sum() > 0
    assert up.weight.grad.abs().sum() > 0


def test_autocast(recipe, sqnr_db):
    layer = _quantized(recipe, 33, 77)
    x = torch.randn(5, 77)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = layer(x)
    assert actual.dtype == torch.bfloat16
    assert sqnr_db(_expected(layer, x), actual) > 25


def test_a_wrong_input_is_refused(default):
    layer = _quantized(default, 33, 77)
    with pytest.raises(Exception, match="77"), torch.no_grad():
        layer(torch.randn(5, 76))
