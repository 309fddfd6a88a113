"""The rule "learned_scale": its values and gradients against plain torch and against `quantize_tensor`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import ComputeWeight, Spec
from ao_core.compute import fake_quantized
from ao_core.compute.extras import fit_extras
from ao_core.compute.linear import cast_matmul
from ao_core.spec import ROW
from ao_core.tensor import quantize_tensor, repack
from ao_core.testing.base import gaussian

INT4 = Spec("int4", ROW)
INT8_TOKENS = Spec("int8", ROW)


def make(block: int = -1, act: Spec | None = None) -> Any:
    """A layer (7 -> 5) whose weight has learned scales."""
    layer = nn.Linear(7, 5)
    layer.bias.data.copy_(gaussian((5,), seed=2))
    matmuls = fake_quantized(Spec("int4", (1, block)), "learned_scale", act)
    layer.weight = nn.Parameter(ComputeWeight(gaussian((5, 7), seed=1), *matmuls))
    fit_extras([(layer, "weight")])
    return layer


def plain(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    """The same in torch alone: straight through round, with the gradients of clamp."""
    steps = scale.repeat_interleave(block, 1)[:, : weight.shape[1]]
    inside = (weight / steps).clamp(-8, 7)
    return (inside + (inside.round() - inside).detach()) * steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), ()], ids=str)
@pytest.mark.parametrize("block", [7, 3], ids=["row", "ragged groups"])
def test_gradients_are_those_of_autograd(
    block: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = make(block).to(dtype)
    x = gaussian((*shape, 7), seed=3).to(dtype).requires_grad_()
    layer.weight_scale.data.mul_(0.8)  # so that some weights are clipped
    out = layer(x)
    by = gaussian(tuple(out.shape), seed=4).to(dtype)
    (out * by).sum().backward()
    weight, scale, bias = (
        p.detach().double().requires_grad_()
        for p in (layer.weight.memory, layer.weight_scale, layer.bias)
    )
    twin = x.detach().double().requires_grad_()
    expected = F.linear(twin, plain(weight, scale, block), bias)
    (expected * by).sum().backward()
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 8e-2}
    )
    for a, b in zip(
        (out, x.grad, layer.weight.grad, layer.weight_scale.grad, layer.bias.grad),
        (expected, twin.grad, weight.grad, scale.grad, bias.grad),
        strict=True,
    ):
        assert a is not None
        assert a.dtype == dtype
        assert type(a.detach()) is Tensor
        torch.testing.assert_close(a.double(), b, **tolerance)
    if shape == (4,):
        assert layer.weight_scale.grad.abs().min() > 0
        assert (layer.weight.grad == 0).any()  # of the clipped ones
        assert (layer.weight.grad != 0).sum() > 15


def test_forward_is_that_of_the_quantized_weight() -> None:
    """Bit for bit, with the scale that was learned, and the kernel of the stored weight."""
    layer = make()
    layer.weight_scale.data.mul_(1.1)
    x = gaussian((4, 7), seed=3)
    quantized = quantize_tensor(layer.weight.memory, INT4, scale=layer.weight_scale.detach())
    assert torch.equal(layer(x), F.linear(x, repack(quantized), layer.bias))
    torch.testing.assert_close(layer(x), F.linear(x, quantized.dequantize(), layer.bias))
    start = make()
    assert torch.equal(start.weight_scale, quantize_tensor(start.weight.memory, INT4).scale)


def test_activations_are_rounded_straight_through() -> None:
    layer = make(act=INT8_TOKENS)
    x = gaussian((2, 3, 7), seed=3).requires_grad_()
    rounded = quantize_tensor(x.detach().reshape(6, 7), INT8_TOKENS).dequantize().reshape(2, 3, 7)
    values = quantize_tensor(layer.weight.memory, INT4).dequantize()
    out = layer(x)
    torch.testing.assert_close(out, F.linear(rounded, values, layer.bias))
    out.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * out.detach() @ values)
    # the gradient of the weight is taken with rounded activations
    rows = 2 * out.detach().reshape(6, 5)
    inside = (layer.weight.memory / layer.weight_scale).abs() <= 7
    expected = (rows.t() @ rounded.reshape(6, 7)) * inside
    torch.testing.assert_close(layer.weight.grad * inside, expected)


def test_autocast_rounds_in_the_dtype_of_the_weight() -> None:
    layer, x = make(), gaussian((4, 7), seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    values = quantize_tensor(layer.weight.memory, INT4).dequantize()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, repack(quantize_tensor(layer.weight.memory, INT4)), layer.bias)
    assert torch.equal(out, expected)
    values = values.bfloat16().float()
    dense = F.linear(x.bfloat16().float(), values, layer.bias.bfloat16().float())
    torch.testing.assert_close(out.float(), dense, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert layer.weight_scale.grad.dtype == torch.float32


def test_backward_casts_the_logical_values_once() -> None:
    """Gradients in bfloat16 do not round the weight before the cast of their matmul does."""
    weight, x = gaussian((33, 64), seed=1), gaussian((4, 64), seed=3).requires_grad_()
    cast = Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW))
    layer = nn.Linear(64, 33, bias=False)
    matmuls = fake_quantized(Spec("int8", ROW), "learned_scale")._replace(grad_input=cast)
    layer.weight = nn.Parameter(ComputeWeight(weight, *matmuls))
    fit_extras([(layer, "weight")])
    by = gaussian((4, 33), seed=4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.backward(by)
    values = quantize_tensor(weight, Spec("int8", ROW)).dequantize().t().contiguous()
    expected = cast_matmul("mm", cast, by, values)
    assert x.grad is not None
    assert torch.equal(x.grad, expected.float())
    assert not torch.equal(cast_matmul("mm", cast, by, values.bfloat16()), expected)


def test_a_scale_at_zero_divides_by_nothing() -> None:
    layer = make()
    layer.weight_scale.data.zero_()
    out = layer(gaussian((4, 7), seed=3))
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(layer.weight_scale.grad).all()
