"""Large tensors in slabs of whole blocks, so that what a computation needs beside them stays small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ao_core.numerics.blocks import full_block, grid_shape
from ao_core.numerics.compiling import may_be_compiled

__all__ = ["SLAB", "is_large", "searched_at_once", "slabs"]

#: elements of a slab, where no block has more
SLAB = 1 << 22

#: elements that a search takes at a time: few enough for a processor's cache, or for a GPU's memory
_SEARCHED = {"cpu": 1 << 17}
_MOST_SEARCHED = 1 << 24

Index = tuple[slice, ...]


def is_large(x: Tensor) -> bool:
    """Whether a tensor is worth cutting; never while tracing, where no size may decide anything."""
    if may_be_compiled(x) or x.is_meta:
        return False
    return x.numel() > SLAB


def searched_at_once(device: torch.device) -> int:
    """How many elements a search, which goes over them again and again, takes at a time."""
    return _SEARCHED.get(device.type, _MOST_SEARCHED)


def slabs(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[Index, Index]]:
    """Indices of slabs that cover a tensor, and of the grid that belongs to each."""
    return _slabs(0, 1, tuple(shape), full_block(block, shape), grid_shape(shape, block))


def _slabs(
    dim: int, width: int, shape: Sequence[int], extents: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Index, Index]]:
    """From dimension `dim` on; the slab has `width` entries of it."""
    if dim == len(shape) or width * prod(shape[dim:]) <= SLAB:
        yield (), ()
        return
    # where one value serves the whole dimension, it may be cut anywhere
    shared = counts[dim] == 1
    unit = 1 if shared else extents[dim]
    step = max(SLAB // max(width * unit * prod(shape[dim + 1 :]), 1), 1) * unit
    for start in range(0, shape[dim], step):
        end = min(start + step, shape[dim])
        rows = slice(start, end)
        grid = slice(0, 1) if shared else slice(start // unit, -(-end // unit))
        for inner, inner_grid in _slabs(dim + 1, width * (end - start), shape, extents, counts):
            yield (rows, *inner), (grid, *inner_grid)
