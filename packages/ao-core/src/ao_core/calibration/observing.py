"""Watching what weights are multiplied with, wherever a model does so: no module or parameter is touched.

Two modes of torch, active only within `observing`. Functions that get a watched weight, or a view of one,
are seen by `_Recorder`: `F.linear` is what layers call. Of other ones, as the forward function of
MultiheadAttention, the matmuls inside are seen by `_Matmuls`. Weights are known by their memory.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core.numerics.fast_dense import fast_dense
from ao_core.tensor.convolutions import unfolded

__all__ = ["Note", "observing"]

aten = torch.ops.aten

#: (name of the weight, number of the matrix in it, activations (..., in) that this one is multiplied with)
Note = Callable[[str, int, Tensor], None]

#: matmuls of activations and a weight -> places of the two among the arguments; but for the first, the
#: weight comes transposed
_MATMULS = {
    aten.linear.default: (0, 1),
    aten.mm.default: (0, 1),
    aten.matmul.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
}


@contextmanager
def observing(weights: Iterable[tuple[str, Tensor]], note: Note) -> Iterator[None]:
    """Within this context `note` is called with the activations of each matmul with one of the weights.

    It is called before the matmul is computed. Compiled models run without their compiled code meanwhile,
    which matmuls could not be seen in.

    Args:
        weights: the weights with the name that `note` is to be given for each: (out, in), (experts, out, in),
            whose matrices are told apart by their number, or filters (out, in / groups, *kernel).
        note: takes that name, the number of the matrix (0 of a single one; of filters, of the group of
            channels) and the activations (..., in), unfolded for filters: (..., in / groups * kernel).
    """
    with (
        _casting_anew(),
        fast_dense(),
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


class _Owner(NamedTuple):
    """A weight by its name, and the number of a matrix in it."""

    name: str
    number: int


class _Memory:
    """Which weight a piece of memory belongs to; keeps the memory alive, so that no other tensor gets it."""

    def __init__(self, parent: _Memory | None = None) -> None:
        #: (first address, address after the last, owner), ascending
        self._pieces: list[tuple[int, int, _Owner]] = []
        self._held: list[Tensor] = []
        self._parent = parent
        #: weights (out, in) that are stored as (in, out)
        self.turned: set[str] = set() if parent is None else parent.turned

    def add(self, owner: _Owner, tensor: Tensor) -> None:
        """More memory of a weight; the matrices of a 3-D tensor count on from the owner's number."""
        if tensor.dim() == 3:
            for number, matrix in enumerate(tensor.unbind(), owner.number):
                self.add(_Owner(owner.name, number), matrix)
        elif tensor.numel():
            insort(self._pieces, (*_span(tensor), owner))
            self._held.append(tensor)

    def owners(self, tensor: Any) -> list[_Owner]:
        """The matrices that a plain tensor is a view of, or of parts of them."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
            return []
        try:
            start, stop = _span(tensor)
        except RuntimeError:  # sparse, or what a function transform shows in place of a tensor
            return []
        place = max(bisect_right(self._pieces, start, key=lambda piece: piece[0]) - 1, 0)
        found = []
        while place < len(self._pieces) and self._pieces[place][0] < stop:
            if self._pieces[place][1] > start:
                found.append(self._pieces[place][2])
            place += 1
        return found or (self._parent.owners(tensor) if self._parent else [])


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one after the last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class _Recorder(TorchFunctionMode):
    """Calls `note` with the activations of each matmul with one of the weights, before it is computed."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], note: Note) -> None:
        super().__init__()
        self._memory, self._note = _Memory(), note
        for name, weight in weights:
            self._memory.add(_Owner(name, 0), weight.detach())
            if weight.dim() == 2 and weight.stride(0) < weight.stride(1):
                self._memory.turned.add(name)

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
        if not any(self._memory.owners(a) for a in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        with _Matmuls(self._memory, self._note):
            return func(*args, **kwargs)

    def _see_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if not (owners := self._memory.owners(weight)):
            return
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        for owner in owners:
            self._note(*owner, input)


class _Matmuls(TorchDispatchMode):
    """The same for the matmuls within one function, also of weights that autocast has cast."""

    def __init__(self, memory: _Memory, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._note = _Memory(memory), note

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MATMULS:
            x, weight = (args[place] for place in _MATMULS[func])
            if func is aten.linear.default:
                self._see(x, weight)
            else:
                self._see_transposed(x, weight)
        elif func is aten._grouped_mm.default:
            self._see_grouped(*args, **kwargs)
        elif func is aten.convolution.default:
            self._see_convolution(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is aten._to_copy.default and (owners := self._memory.owners(args[0])):
            self._memory.add(owners[0], out)
        return out

    def _see(self, x: Tensor, weight: Tensor) -> None:
        for owner in self._memory.owners(weight):
            self._note(*owner, x)

    def _see_transposed(self, x: Tensor, weight: Tensor) -> None:
        """A matmul with a matrix (in, out), a batch of them, or one that stands for a batch."""
        if weight.dim() == x.dim() == 3 and weight.stride(0) != 0:
            for one, matrix in zip(x.unbind(), weight.unbind(), strict=True):
                self._see_transposed(one, matrix)
        elif weight.dim() == 2 or weight.stride(0) == 0:
            for owner in self._memory.owners(weight):
                if _is_transposed(weight, owner.name in self._memory.turned):
                    self._note(*owner, x)

    def _see_grouped(
        self, x: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: Any, **options: Any
    ) -> None:
        """A matmul of rows sorted by expert, which end where `offs` says, or of a batch for each."""
        if weight.dim() != 3 or not self._memory.owners(weight):
            return
        if offs is None:
            self._see_transposed(x, weight)
            return
        ends = offs.tolist()
        for start, stop, matrix in zip([0, *ends], ends, weight.unbind(), strict=False):
            self._see_transposed(x[start:stop], matrix)

    def _see_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
    ) -> None:
        if not transposed and (owners := self._memory.owners(weight)):
            rows = unfolded(x, tuple(weight.shape), stride, padding, dilation, groups)
            for number, each in enumerate(rows):
                self._note(owners[0].name, number, each)


def _is_transposed(weight: Tensor, turned: bool) -> bool:
    """Whether a matrix, or one that stands for a batch of them, is a weight (out, in) seen as (in, out).

    `turned`: the weight is stored as (in, out).
    """
    rows, columns = weight.stride(-2), weight.stride(-1)
    return rows >= columns if turned else rows <= columns
