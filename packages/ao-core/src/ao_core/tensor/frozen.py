"""The matmul with a weight that is not trained, as one node of the eager autograd graph.

Autograd's own formula for a linear layer transposes the weight, forward and backward, and each transpose
of a `QTensor` is a new tensor around its parts. One node with the same two matmuls takes a fraction of
the time. Code that is traced has no use for it: there the transposes cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.dispatch import PIN, name_kernel, select
from ao_core.records import Call, Kernel
from ao_core.registry import registry
from ao_core.tensor.codec import decode_parts, decode_reference
from ao_core.tensor.sharding import is_sharded

if TYPE_CHECKING:
    from ao_core.tensor.qtensor import QTensor

__all__ = ["NOBODY", "OTHERS", "ROWS", "differentiable_linear", "needs_gradient"]

#: who needs a gradient of a matmul: neither operand, the activations or the bias alone, or others
NOBODY, ROWS, OTHERS = 0, 1, 2

# an attribute of a subclass is a call of `__torch_function__`, a microsecond each
_plainly = torch._C.DisableTorchFunctionSubclass
_is_grad_enabled = torch.is_grad_enabled


def needs_gradient(x: Tensor, w: QTensor, bias: Tensor | None) -> int:
    """Who needs a gradient, while gradients are recorded and nothing is transformed.

    `OTHERS`: the weight is trained, or the bias is of a subclass; those take autograd's own way.
    """
    of_bias = bias is not None and bias.requires_grad
    with _plainly():
        of_weight = w.requires_grad
    if not (of_weight or of_bias or x.requires_grad):
        return NOBODY
    plain = bias is None or type(bias) is nn.Parameter or type(bias) is Tensor
    return OTHERS if of_weight or not plain else ROWS


def differentiable_linear(x: Tensor, w: QTensor, bias: Tensor | None, kernel: Kernel) -> Tensor:
    """The matmul by a kernel of the op "linear", with gradients for x and the bias.

    Args:
        x: plain activations (…, K).
        w: a weight (N, K) that needs no gradient.
        bias: (N,), plain, or None.
        kernel: the one selected for this call.

    Returns:
        What the kernel returns, (…, N). The gradient of x is ``grad @ w``, with w in the dtype of grad.
    """
    with _plainly():
        # the weight goes in a tuple, so that autograd does not take it for an operand
        return _apply(x, bias, (w, kernel))  # type: ignore[no-any-return]


def _dense(w: QTensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight that is not permuted; it remembers the kernel, as it does for matmuls."""
    held = w.__dict__  # `w.parts`, in half the time
    parts = {name: held[name] for name in w.part_names}
    if is_sharded(next(iter(parts.values()))):
        return decode_reference(parts, w.spec, tuple(w.shape), dtype)
    if w.spec.input:  # which are undone after the kernel
        return decode_parts(parts, w.spec, tuple(w.shape), dtype)
    key = ("dequantize", dtype, PIN.get(), registry.epoch)
    bound = w._bound.get(key)
    if bound is None:
        shape = tuple(w.shape)
        call = Call("dequantize", w.spec, shape, shape, dtype, w.device.type)
        bound = w._bound[key] = (select(call), shape)
    kernel, shape = bound
    try:
        return kernel.fn(parts, w.spec, shape, dtype)  # type: ignore[no-any-return]
    except Exception as error:
        name_kernel(error, kernel)
        raise


def _backward(grad: Tensor, w: QTensor) -> Tensor:
    """``grad @ w``; the weight in its stored shape."""
    dense = _dense(w, grad.dtype)
    return torch.mm(grad, dense) if grad.dim() == 2 else grad @ dense


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, how: tuple[QTensor, Kernel]) -> Tensor:
        w, kernel = how
        ctx.weight, ctx.version = w, w._version
        try:
            return kernel.fn(x, w, bias)  # type: ignore[no-any-return]
        except Exception as error:
            name_kernel(error, kernel)
            raise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w = ctx.weight
        of_x, of_bias, _ = ctx.needs_input_grad
        grad_x = grad_bias = None
        with _plainly():
            if w._version != ctx.version:
                raise RuntimeError(
                    f"the quantized weight of shape {tuple(w.shape)} was changed in place between the "
                    "forward and the backward pass, which needs it as it was"
                )
            if of_x and _is_grad_enabled() and grad.requires_grad:
                grad_x = _Transposed.apply(grad, (w,))  # type: ignore[no-untyped-call]
            elif of_x:
                grad_x = _backward(grad, w)
            if of_bias:
                grad_bias = grad if grad.dim() == 1 else grad.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None


#: `_Linear.apply` without what it does for transforms, a quarter of its time; they go another way
_apply: Any = super(torch.autograd.Function, _Linear).apply


class _Transposed(torch.autograd.Function):
    """``grad @ w`` where its own gradient is asked for, which is a matmul with w again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, how: tuple[QTensor]) -> Tensor:
        (ctx.weight,) = how
        return _backward(grad, ctx.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return F.linear(grad, ctx.weight), None
