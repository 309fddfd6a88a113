"""Timing of matmuls whose weights come from memory: each contender takes turns on copies of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarking import Samples, rounds_of

#: all copies of a weight together, so that none is in a cache when its turn comes
ROTATED = 128 << 20
#: least seconds of a sample, unless all copies take less
SAMPLE = 2e-3

Call = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """One way to multiply by a weight of a given shape."""

    name: str
    #: of one copy of the weight, with its scales and zero points: what a call must read
    nbytes: int
    #: of the activations
    dtype: torch.dtype
    #: rows of activations -> a call for each copy of the weight
    calls: Callable[[int], Sequence[Call]]
    #: it is so slow that it is not timed for more rows than these
    most_rows: int | None = None
    #: what serves it, where that is a choice
    kernel: str = ""
    #: the largest part of each copy, to compare with what only reads it
    memory: Sequence[Tensor] = ()


#: a dense weight (N, K), float32 -> a contender
Maker = Callable[[Tensor], Contender]


def copies(nbytes: int) -> range:
    """Numbers of the copies that a weight of so many bytes is rotated over."""
    return range(max(2, ROTATED // nbytes + 1))


def rolled(weight: Tensor, number: int) -> Tensor:
    """A copy of (N, K) with the same values in other places: no two pages of two copies are equal."""
    return weight.roll((number, 32 * number), (0, 1))


def shifted(tensor: Tensor, number: int) -> Tensor:
    """A copy of a quantized tensor whose bytes, and scales, stand elsewhere: just as good for timing."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: shifted(getattr(tensor, name), number) for name in names}
        return tensor.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    if tensor.numel() <= 256:  # a table of the codes' values, or a scale of the scales
        return tensor.clone()
    return tensor.flatten().roll(129 * number).view(tensor.shape)


def matmul(
    name: str,
    weights: Iterable[Any],
    nbytes: int,
    multiply: Callable[[Tensor, Any], object],
    columns: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **fields: Any,
) -> Contender:
    """A contender that calls `multiply(x, weight)` with normal x (M, `columns`)."""
    rotated = list(weights)

    def calls(m: int) -> list[Call]:
        x = torch.randn(m, columns).to(dtype)
        return [partial(multiply, x, weight) for weight in rotated]

    return Contender(name, nbytes, dtype, calls, **fields)


class Timed:
    """Seconds of a call, each time over the next few copies of the weight.

    A call before that is not timed: it brings back the contender's code, not its weights, which the others
    have driven out of the caches. Layers of a model follow each other as the timed calls do.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.turns = cycle(calls)
        self.count = 1
        self.count = min(max(1, len(calls) - 1), math.ceil(SAMPLE / self()))

    def __call__(self) -> float:
        first, *calls = islice(self.turns, self.count + 1)
        first()
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / self.count


def measured(contenders: Iterable[Contender], m: int, rounds: int) -> Samples:
    """Seconds of a matmul with m rows, of every contender in each round."""
    timed = {
        c.name: Timed(c.calls(m)) for c in contenders if c.most_rows is None or m <= c.most_rows
    }
    return rounds_of(timed, rounds)
