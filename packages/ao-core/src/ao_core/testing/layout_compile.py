"""Part of `LayoutSuite`: gradients, torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.testing.base import gaussian
from ao_core.testing.layout_state import linear_of
from ao_core.testing.samples import Sample, activations

__all__ = ["LayoutCompile"]


def close(actual: Tensor, expected: Tensor, rtol: float = 2e-5) -> None:
    """Assert equal shape and dtype, and a relative error in norm of at most `rtol`."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    error = (actual.double() - expected.double()).norm()
    assert float(error) <= rtol * float(expected.double().norm()) + 1e-30


class LayoutCompile:
    """A linear layer with a weight in this layout, traced and differentiated."""

    layout: str

    @pytest.mark.parametrize(
        "lead",
        [(), (1,), (4,), (0,), (2, 3)],
        ids=lambda lead: "x".join(map(str, lead)) or "vector",
    )
    def test_linear(self, lead: tuple[int, ...], weight: Sample) -> None:
        """F.linear on any batch equals the dense matmul of the values."""
        q = weight.quantized()
        layer = linear_of(q)
        x = gaussian((*lead, weight.shape[1]))
        values = activations(x, q).float()
        expected = F.linear(values, q.dequantize(), layer.bias)
        close(layer(x), expected)
        with torch.inference_mode():
            close(layer(x), expected)
        close(x @ q.t(), F.linear(values, q.dequantize()))

    def test_embedding(self, weight: Sample) -> None:
        """F.embedding reads the rows."""
        q = weight.quantized()
        ids = torch.tensor([[0, weight.shape[0] - 1], [1, 0]])
        assert torch.equal(F.embedding(ids, q), F.embedding(ids, q.dequantize()))

    @pytest.mark.parametrize("shape", [(5,), (2, 3), ()], ids=str)
    def test_gradient_of_the_input(self, shape: tuple[int, ...], weight: Sample) -> None:
        """What LoRA needs: the gradient of the input, and of the bias, through a frozen weight."""
        q = weight.quantized()
        layer = linear_of(q)
        assert layer.bias is not None
        layer.bias.requires_grad_(True)
        x = gaussian((*shape, weight.shape[1])).requires_grad_(True)
        out = layer(x)
        weights = gaussian(out.shape, seed=2)
        (out * weights).sum().backward()
        close(x.grad, weights @ q.dequantize())  # type: ignore[arg-type]
        close(layer.bias.grad, weights.reshape(-1, weight.shape[0]).sum(0))  # type: ignore[arg-type]
        assert layer.weight.grad is None

    def test_compiles_once(self, weight: Sample) -> None:
        """One graph without a break; no new one for a second call or another such weight."""
        import torch._dynamo.testing

        layer, other = linear_of(weight.quantized()), linear_of(weight.quantized(seed=6))
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled: Any = torch.compile(_call, fullgraph=True, backend=counter)
        for layer_ in (layer, layer, other):
            x = gaussian((3, weight.shape[1]))
            close(compiled(x, layer_.weight, layer_.bias), layer_(x))
        assert counter.frame_count == 1
        torch._dynamo.reset()

    def test_compiled_gradient(self, weight: Sample) -> None:
        """The gradient of the input through a compiled layer."""
        layer = linear_of(weight.quantized())
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = gaussian((3, weight.shape[1])).requires_grad_(True)
        compiled(x).square().sum().backward()
        y = x.detach().clone().requires_grad_(True)
        layer(y).square().sum().backward()
        close(x.grad, y.grad)  # type: ignore[arg-type]
        torch._dynamo.reset()

    def test_inductor(self, weights: list[Sample]) -> None:
        """Generated code, once for the layout."""
        layer = linear_of(weights[0].quantized())
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True)
        x = gaussian((3, weights[0].shape[1]))
        with torch.inference_mode():
            close(compiled(x), layer(x))
            close(compiled(x + 1), layer(x + 1))
        torch._dynamo.reset()

    def test_export(self, weight: Sample) -> None:
        """torch.export gives a program with the same results."""
        layer = linear_of(weight.quantized())
        x = gaussian((3, weight.shape[1]))
        program = torch.export.export(layer, (x,))
        close(program.module()(x), layer(x))


def _call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)
