"""Watching what weights are multiplied with, wherever a model does so: no module or parameter is touched.

Two modes of torch, active only within `observing`. Functions that get a watched weight, or a view of one,
are seen by `_Recorder`: `F.linear` is what layers call. Of other ones, as the forward function of
MultiheadAttention, the products inside are seen by `_Products`. Weights are known by their memory.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Note", "observing"]

aten = torch.ops.aten

#: (name of the weight, activations (..., in) that it is multiplied with)
Note = Callable[[str, Tensor], None]

#: products of activations and a weight -> places of the two among the arguments; but for the first, the
#: weight comes transposed
_PRODUCTS = {
    aten.linear.default: (0, 1),
    aten.mm.default: (0, 1),
    aten.matmul.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
}


@contextmanager
def observing(weights: Iterable[tuple[str, Tensor]], note: Note) -> Iterator[None]:
    """Within this context `note` is called with the activations of each product with one of the weights.

    It is called before the product is computed. Compiled models run without their compiled code meanwhile,
    which products could not be seen in.

    Args:
        weights: the weights, (out, in), with the name that `note` is to be given for each.
        note: takes that name and the activations (..., in).
    """
    with (
        torch.compiler.set_stance("force_eager"),
        _casting_anew(),
        _Recorder(weights, note),
    ):
        yield


@contextmanager
def _casting_anew() -> Iterator[None]:
    """Autocast keeps no casts of weights, whose memory nobody could tell."""
    torch.clear_autocast_cache()
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Memory:
    """Which weight a piece of memory belongs to; keeps the memory alive, so that no other tensor gets it."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        #: (first address, address after the last, name), ascending
        self._pieces: list[tuple[int, int, str]] = []
        self._held: list[Tensor] = []
        for name, weight in weights:
            self.add(name, weight.detach())

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.numel():
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            start = tensor.data_ptr()
            insort(self._pieces, (start, start + (last + 1) * tensor.element_size(), name))
            self._held.append(tensor)

    def owner(self, tensor: Any) -> str | None:
        """The name of the weight that a plain tensor is, or is a view of."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse, or what a function transform shows in place of a tensor
            return None
        place = bisect_right(self._pieces, address, key=lambda piece: piece[0]) - 1
        if place < 0 or address >= self._pieces[place][1]:
            return None
        return self._pieces[place][2]


class _Recorder(TorchFunctionMode):
    """Calls `note` with the activations of each product with one of the weights, before it is computed."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], note: Note) -> None:
        super().__init__()
        self._memory, self._note = _Memory(weights), note

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            self._see_linear(*args, **kwargs)
            return func(*args, **kwargs)
        found = [(name, a) for a in (*args, *kwargs.values()) if (name := self._memory.owner(a))]
        if not found:
            return func(*args, **kwargs)
        with _Products(found, self._note):
            return func(*args, **kwargs)

    def _see_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if (name := self._memory.owner(weight)) is None:
            return
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        self._note(name, input)


class _Products(TorchDispatchMode):
    """The same for the products within one function, also of weights that autocast has cast."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._note = _Memory(weights), note

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS:
            x, weight = (args[place] for place in _PRODUCTS[func])
            name = self._memory.owner(weight)
            if name is not None and (func is aten.linear.default or _is_transposed(weight)):
                self._note(name, x)
        out = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and (name := self._memory.owner(args[0])):
            self._memory.add(name, out)
        return out


def _is_transposed(weight: Tensor) -> bool:
    """Whether a matrix, or one that stands for a batch of them, is a weight (out, in) seen as (in, out)."""
    is_one = weight.dim() == 2 or weight.stride(0) == 0
    return is_one and weight.stride(-2) <= weight.stride(-1)
