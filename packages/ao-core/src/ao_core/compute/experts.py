"""`ComputeWeight`s of experts: three matmuls for each, with rows sorted by expert or in a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.compute.linear import cast_matmul
from ao_core.compute.matmuls import rule_name
from ao_core.compute.reading import needs_no_extras, on_rounded, stored
from ao_core.compute.weight import FUNCTIONS, MATMULS, ComputeWeight, on_memory
from ao_core.spec import Spec
from ao_core.tensor.autocast import autocasted
from ao_core.tensor.wrapper import dense_memory

__all__: list[str] = []

#: the operator itself, which the weight sees below autograd only
_grouped_mm = torch.ops.aten._grouped_mm.default


def _grouped(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ w`` for the rows of each expert, in place of `torch._grouped_mm`; w (E, K, N)."""
    if not isinstance(w, ComputeWeight):  # it is another operand: nothing says how to cast
        with torch._C.DisableTorchFunctionSubclass():
            return torch._grouped_mm(x, w, offs=offs, bias=bias, out_dtype=out_dtype)
    if needs_no_extras(w):
        read = on_rounded(torch._grouped_mm)
        return read(x, w, offs=offs, bias=bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    out = _cast(x, w, offs)
    out = out if out_dtype is None else out.to(out_dtype)
    return out if bias is None else out + bias


def _bmm(x: Tensor, w: Tensor) -> Tensor:
    """The same without offsets, in place of `torch.bmm`."""
    if not isinstance(w, ComputeWeight):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.bmm(x, w)
    if needs_no_extras(w):
        return on_rounded(torch.bmm)(x, w)  # type: ignore[no-any-return]
    return _cast(x, w, None)


def _cast(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    x, w = autocasted(x, w)
    out: Tensor = _GroupedMM.apply(x, w, offs)  # type: ignore[no-untyped-call]
    return out


class _GroupedMM(torch.autograd.Function):
    """The three matmuls of each expert.

    In those of the backward pass the weight is in the place of the bias: it adds nothing, it only says
    which matmul it is and brings its spec.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        out: Tensor = _grouped_mm(x, w, offs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, offs = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_mm(grad, w.transpose(-2, -1), offs, w)
        if ctx.needs_input_grad[1]:
            grad_ENK = _grouped_mm(grad.transpose(-2, -1), x, offs, w)
            grad_w = grad_ENK.transpose(-2, -1)
        return grad_x, grad_w, None


def _grouped_matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Which of the three matmuls it is, below autograd; see `_GroupedMM`."""
    named = {**dict(zip(("self", "mat2", "offs", "bias"), args, strict=False)), **kwargs}
    a, b, offs, weight = named["self"], named["mat2"], named.get("offs"), named.get("bias")
    if not isinstance(b if weight is None else weight, ComputeWeight):
        return on_memory(func, args, kwargs)  # type: ignore[no-any-return]
    if isinstance(b, ComputeWeight) and rule_name(b.matmuls.output):
        return torch._grouped_mm(a, stored(b), offs=offs)
    contracted_last = dense_memory(b).transpose(-2, -1)
    if weight is None:
        return _matmul(a, contracted_last, offs, b.matmuls.output)
    backward = weight.matmuls
    spec = backward.grad_input if isinstance(b, ComputeWeight) else backward.grad_weight
    return _matmul(a, contracted_last, offs, spec)


def _matmul(a: Tensor, b: Tensor, offs: Tensor | None, spec: Spec | None) -> Tensor:
    """``a @ b.T`` for each expert, both with the contracted dimension last."""
    if spec is None:
        return torch._grouped_mm(a, b.transpose(-2, -1), offs=offs)
    return cast_matmul("grouped_mm", spec, a, b, offs)


FUNCTIONS.update({torch._grouped_mm: _grouped, F.grouped_mm: _grouped, torch.bmm: _bmm})
MATMULS[_grouped_mm] = _grouped_matmul
