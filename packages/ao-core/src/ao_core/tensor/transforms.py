"""Matmuls under the transforms of `torch.func` and under forward-mode derivatives.

Kernels know no derivatives, and those that quantize activations would quantize tangents too. Here the
matmul is computed by the kernel and is differentiated as ``x @ w.dequantize().T`` (straight through the
quantization of x), as the backward pass of eager code is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ao_core.autograd import signed
from ao_core.errors import UnsupportedOp
from ao_core.records import Kernel
from ao_core.spec import matrix_block
from ao_core.tensor.qtensor import QTensor

__all__ = ["is_transforming", "refuse_quantized_activations", "transformed_linear"]

_innermost = torch._C._functorch.peek_interpreter_stack

#: gives the kernel that serves x and w
KernelOf = Callable[[Tensor, QTensor], Kernel]


def is_transforming() -> bool:
    """Whether a transform of `torch.func`, or a level of forward-mode derivatives, is active."""
    return forward_ad._current_level >= 0 or _innermost() is not None


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight, which transforms are not to wrap: nothing is differentiated in it, nor batched."""

    tensor: QTensor
    kernel_of: KernelOf

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.dequantize(dtype)

    @property
    def needs_samples(self) -> bool:
        """Whether rows of activations share a scale chosen for each call, so that each sample has its own."""
        act = self.tensor.spec.act
        return act is not None and not act.is_static and matrix_block(act.block)[0] != 1


def transformed_linear(x: Tensor, w: QTensor, bias: Tensor | None, kernel_of: KernelOf) -> Tensor:
    """``x @ w.T + bias``, which every transform knows how to differentiate in x and bias, and to batch."""
    return _matmul(x, bias, _Weight(w, kernel_of))


def _matmul(x: Tensor, bias: Tensor | None, weight: _Weight) -> Tensor:
    out: Tensor = _Linear.apply(x, bias, weight)  # type: ignore[no-untyped-call]
    return out


def refuse_quantized_activations(op: str, w: QTensor) -> None:
    """Raise `UnsupportedOp` for a matmul whose activations are quantized, where a transform is active."""
    if w.spec.act is not None and is_transforming():
        raise UnsupportedOp(
            f"{op} under torch.func or forward-mode derivatives with activations that are quantized "
            f"({w.spec}): its derivative would be that of rounding; use a weight-only format, or linear "
            "layers"
        )


@signed
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, weight: _Weight) -> Tensor:
        out: Tensor = weight.kernel_of(x, weight.tensor).fn(x, weight.tensor, bias)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, bias, ctx.weight = inputs
        ctx.size_of_bias = None if bias is None else bias.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ ctx.weight.dense(grad.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad.sum_to_size(ctx.size_of_bias)
        return of_x, of_bias, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, bias: Tensor | None, weight: Any) -> Tensor | None:
        out: Tensor | None = None if x is None else x @ ctx.weight.dense(x.dtype).t()
        if out is None or bias is None:
            return bias if out is None else out
        return out + bias

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        bias: Tensor | None,
        weight: _Weight,
    ) -> tuple[Tensor, int]:
        of_x, of_bias, _ = in_dims
        shared = bias if of_bias is None else None
        rows = x.unsqueeze(0) if of_x is None else x.movedim(of_x, 0)
        if weight.needs_samples and len(rows) > 1:
            out = torch.stack([_matmul(sample, shared, weight) for sample in rows.unbind()])
        else:
            out = _matmul(rows, shared, weight)
        if bias is not None and of_bias is not None:
            biases = bias.movedim(of_bias, 0)
            out = out + biases.reshape(-1, *(1,) * (out.dim() - 2), biases.shape[-1])
        return out.expand(info.batch_size, *out.shape[1:]), 0
