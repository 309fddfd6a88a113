"""Batch-invariant mode: the result of a row does not depend on the other rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ao_core.dispatch import run
from ao_core.registry import registry
from ao_core.tensor.matmuls import select_linear
from ao_core.tensor.qtensor import QTensor

__all__ = ["DenseCall", "batch_invariant", "dense_linear", "is_batch_invariant"]

#: whether this thread, or task of asyncio, is in the mode
_ON: ContextVar[bool] = ContextVar("ao_batch_invariant", default=False)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DenseCall:
    """A matmul with a dense weight; an `OpCall`."""

    dtype: torch.dtype
    device: str
    op: str = "dense_linear"
    layout: str = "dense"
    specs: tuple[()] = ()


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The reference: one row after the other."""
    return _by_row(x, lambda row: F.linear(row, weight, bias))


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Within this context linear layers, and attention over quantized caches, treat every row alone.

    Row i of a batch, or token i of a text, then gets the same bits whatever else is in the batch. By default
    kernels choose the fastest order of sums for the number of rows, so results differ by rounding. One row
    costs what it costs anyway; the cost of several has not been measured. The variable AO_BATCH_INVARIANT=1
    sets the mode for a process.

    Linear layers with dense weights have kernels of their own in the mode, which round otherwise than those
    of torch. Kernels that know nothing of it, and weights that are trained, get their rows one by one. What
    torch computes otherwise, such as its own attention or `torch.matmul`, is as it was. Compiled programs are
    as they were compiled, except for the C++ kernels in them.
    """
    if _ON.get():
        yield
        return
    registry.freeze()
    told = [tell for tell in _listeners() if tell is not None]
    _ON.set(True)
    for tell in told:
        tell(1)
    try:
        with _Alone():
            yield
    finally:
        for tell in told:
            tell(-1)
        _ON.set(False)


def is_batch_invariant() -> bool:
    """Whether this thread, or task of asyncio, is in the mode."""
    return _ON.get()


def _listeners() -> list[Callable[[int], object] | None]:
    """What kernels that know of the mode want to be told by, each once."""
    found = {kernel.alone: kernel for kernel in registry.kernels.values() if kernel.alone}
    return [tell for tell, kernel in found.items() if kernel.unavailable() is None]


class _Alone(TorchFunctionMode):
    """Sends every linear layer to what treats rows alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    inference = not torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled()
    if type(weight) is QTensor and type(input) is Tensor and weight.dim() == 2:
        kernel = select_linear(input.reshape(-1, input.shape[-1])[:1], weight)
        if kernel.alone is not None and inference and not weight.is_permuted:
            return kernel.fn(input, weight, bias)  # type: ignore[no-any-return]
        return _by_row(input, lambda row: F.linear(row, weight, bias))
    if inference and _is_dense(input) and _is_dense(weight) and weight.dim() == 2:
        call = DenseCall(input.dtype, input.device.type)
        return run(call, input, weight, bias)  # type: ignore[no-any-return]
    return _by_row(input, lambda row: F.linear(row, weight, bias))


def _is_dense(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.dtype in _DTYPES


def _by_row(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function of rows (1, K) makes of all rows of (..., K)."""
    if x.dim() < 2 or x.shape[:-1].numel() == 1:
        return fn(x)
    rows = [fn(row) for row in x.reshape(-1, x.shape[-1]).split(1)]
    if not rows:
        return fn(x)
    return torch.cat(rows).reshape(*x.shape[:-1], rows[0].shape[-1])


def enter_for_process() -> None:
    """Set the mode for good, as AO_BATCH_INVARIANT asks; C++ kernels read the variable themselves."""
    _ON.set(True)
    _Alone().__enter__()  # type: ignore[no-untyped-call]
