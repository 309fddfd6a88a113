"""Functions of torch that ask a `ComputeWeight` for its memory, or multiply by it in other words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ao_core.compute.gather import GatherState
from ao_core.compute.linear import linear
from ao_core.compute.reading import needs_no_extras
from ao_core.compute.weight import FUNCTIONS, MATMULS, ComputeWeight
from ao_core.errors import UnsupportedOp
from ao_core.tensor.memory import checked_data
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.wrapper import dense_memory

__all__: list[str] = []

aten = torch.ops.aten

# -- memory ----------------------------------------------------------------------------------------

#: questions about memory: the answer is that of the memory in high precision
_QUESTIONS = (
    "__array__",
    "__dlpack__",
    "__dlpack_device__",
    "apply_",
    "const_data_ptr",
    "data_ptr",
    "is_shared",
    "map_",
    "numpy",
    "share_memory_",
    "storage",
    "storage_offset",
    "tolist",
    "untyped_storage",
)
#: what would change the memory and not the weight around it
_REFUSED = ("resize_", "resize_as_")


#: those that say where memory is, which tracing asks of wrapper and memory one after the other
_PLACES = (Tensor.untyped_storage, Tensor.storage_offset)


def _is_described() -> bool:
    """Whether torch asks in order to make a fake tensor: two that share a storage would be views of it.

    Nothing but the caller tells that apart: there is no mode yet, and the tensor is a real one.
    """
    frame: Any = sys._getframe()
    for _ in range(5):
        frame = frame and frame.f_back
        if frame and frame.f_globals.get("__name__") == "torch._subclasses.meta_utils":
            return True
    return False


def _of_memory(method: Any) -> Callable[..., Any]:
    def ask(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if method in _PLACES and _is_described():
            with torch._C.DisableTorchFunctionSubclass():
                return method(weight, *args, **kwargs)
        memory = dense_memory(weight)
        if weight.requires_grad:  # so that torch says what it does not do with such tensors
            memory = memory.detach().requires_grad_()
        args = tuple(dense_memory(a) if isinstance(a, Tensor) else a for a in args)
        found = method(memory, *args, **kwargs)
        return weight if found is memory else found

    return ask


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOp(
            f"{name} on a weight with low-precision matmuls: its memory would have another size than "
            "the weight; make a new parameter, and convert that"
        )

    return refuse


_asked = [getattr(Tensor, name) for name in _QUESTIONS if hasattr(Tensor, name)]
FUNCTIONS.update({method: _of_memory(method) for method in _asked})
FUNCTIONS.update({getattr(Tensor, name): _refusing(name) for name in _REFUSED})
# torch asks no subclass about `set_`: it arrives below autograd
_set = _refusing("set_")
MATMULS.update(dict.fromkeys((aten.set_.default, aten.set_.source_Tensor), _set))


def _assign(target: ComputeWeight, value: Any) -> None:
    """``target.data = value``: other dense memory, with the same matmuls."""
    memory = dense_memory(checked_data(target, value))
    if isinstance(memory, QTensor):
        memory = memory.dequantize()
    new = target.like(memory.detach())
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(target, new)  # type: ignore[attr-defined]
    target.memory, target.gather_state = new.memory, GatherState()


FUNCTIONS[Tensor.data.__set__] = _assign  # type: ignore[attr-defined]

# -- matmuls --------------------------------------------------------------------------------------


def _multiplies(x: Any, w: Any) -> bool:
    """Whether ``x @ w`` is the matmul of a linear layer, whose weight is the transpose of w."""
    return (
        isinstance(w, ComputeWeight)
        and w.dim() == 2
        and isinstance(x, Tensor)
        and x.dim() > 0
        and x.is_floating_point()
    )


def _matmul(matmul: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def multiply(x: Any, w: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and _multiplies(x, w):
            return linear(x, w.t())
        if not args and not kwargs and isinstance(w, ComputeWeight) and w.dim() == x.dim() == 3:
            return torch.bmm(x, w)  # one matmul for each expert
        with torch._C.DisableTorchFunctionSubclass():
            return matmul(x, w, *args, **kwargs)

    return multiply


def _addmm(
    bias: Tensor, x: Tensor, w: Tensor, *, beta: Any = 1, alpha: Any = 1, **kwargs: Any
) -> Tensor:
    if kwargs or not _multiplies(x, w) or x.dim() != 2:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.addmm(bias, x, w, beta=beta, alpha=alpha, **kwargs)
    if beta == alpha == 1 and bias.dim() == 1 and needs_no_extras(w):
        return linear(x, w.t(), bias)  # kernels add it before they round
    out = linear(x, w.t())
    out = out if alpha == 1 else out * alpha
    if beta == 0:  # NaN in the bias is not read
        return out
    bias = bias.to(out.dtype) if torch.is_autocast_enabled(x.device.type) else bias
    return out + (bias if beta == 1 else bias * beta)


def _reflected(w: Tensor, x: Tensor) -> Tensor:
    """``x.__rmatmul__``: torch calls it as (right operand, left operand)."""
    return torch.matmul(x, w)


FUNCTIONS.update(
    {each: _matmul(each) for each in (torch.matmul, Tensor.matmul, torch.mm, Tensor.mm)}
)
FUNCTIONS[Tensor.__matmul__] = _matmul(Tensor.__matmul__)
FUNCTIONS[Tensor.__rmatmul__] = _reflected
FUNCTIONS.update({torch.addmm: _addmm, Tensor.addmm: _addmm})
