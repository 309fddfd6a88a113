"""Blocks: the elements that share one scale. Everything here works on any shape, ragged or empty.

A *grid* is a tensor with one value per block and as many dimensions as the tensor it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ao_core.errors import ConfigError
from ao_core.spec import WHOLE

__all__ = [
    "block_absmax",
    "block_absmean",
    "block_minmax",
    "check_grid",
    "expand",
    "full_block",
    "grid_shape",
    "split_blocks",
]


def full_block(block: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The extent of a block in every dimension of `shape`.

    `block` is aligned to the last dimensions: missing leading extents are 1, surplus ones are
    dropped; `WHOLE` becomes the size of its dimension and no extent exceeds it (but is at least 1).
    """
    missing = len(shape) - len(block)
    aligned = (1,) * missing + tuple(block)[max(-missing, 0) :]
    return tuple(
        1 if extent == 1 else max(1, size if extent == WHOLE else min(extent, size))
        for extent, size in zip(aligned, shape, strict=True)
    )


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Blocks along each dimension: ceil(size / extent); `WHOLE` is one block even of size 0."""
    missing = len(shape) - len(block)
    return tuple(
        1 if i >= missing and block[i - missing] == WHOLE else -(-size // extent)
        for i, (size, extent) in enumerate(zip(shape, full_block(block, shape), strict=True))
    )


def block_minmax(x: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Least and greatest element of every block, of shape `grid_shape(x.shape, block)`, in `x`'s dtype.

    NaN where a block holds one, 0 where a block is empty. A block at the edge of a ragged shape is smaller.
    """
    return _reduce(x, block, torch.amin), _reduce(x, block, torch.amax)


def block_absmax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Greatest magnitude in every block, otherwise as `block_minmax`."""
    # Two reductions that only read are faster than writing all of |x|.
    low, high = block_minmax(x, block)
    return torch.maximum(high, -low)


def block_absmean(x: Tensor, block: Sequence[int]) -> Tensor:
    """Mean magnitude of every block, float32 of shape `grid_shape(x.shape, block)`; 0 where one is empty."""
    return _reduce(x.to(torch.float32).abs(), block, torch.mean)


def block_sum(x: Tensor, block: Sequence[int]) -> Tensor:
    """Sum of every block, otherwise as `block_minmax`."""
    return _reduce(x, block, torch.sum)


def expand(grid: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Repeat each value of a grid over its block: a tensor that broadcasts against `shape`.

    Dimensions that are one block stay of size 1.
    """
    check_grid(grid, shape, block)
    for dim, extent in enumerate(full_block(block, shape)):
        if extent == 1 or grid.shape[dim] == 1:
            continue
        # An integer division would reach Inductor's index expressions, whose loops for CPUs then lose
        # the ragged tail (pytorch/pytorch#195582, torch 2.13), as they would of repeated values cut off
        # and of a padded tensor in blocks. A quotient in float64, truncated, is the same number.
        places = torch.arange(shape[dim], dtype=torch.float64, device=grid.device)
        grid = grid.index_select(dim, (places / extent).to(torch.int64))
    return grid


def split_blocks(x: Tensor, block: Sequence[int], grid: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `x` and a grid that broadcast against each other, block by block.

    Where the blocks divide the shape, both are views and nothing is copied; a ragged shape leaves
    `x` as it is and repeats the grid with `expand`. The view of `x` reshapes back to `x.shape`.
    """
    check_grid(grid, x.shape, block)
    x_sizes: list[int] = []
    grid_sizes: list[int] = []
    extents = full_block(block, x.shape)
    for size, extent, count in zip(x.shape, extents, grid.shape, strict=True):
        if extent == 1 or count == 1:
            x_sizes.append(size)
            grid_sizes.append(count)
        elif size % extent == 0:
            x_sizes += [count, extent]
            grid_sizes += [count, 1]
        else:
            return x, expand(grid, x.shape, block)
    if len(x_sizes) == x.dim():
        return x, grid
    return x.view(x_sizes), grid.reshape(grid_sizes)


def _reduce(x: Tensor, block: Sequence[int], op: Callable[..., Tensor]) -> Tensor:
    """Reduce every block with `op`; a ragged tail is reduced by itself: nothing is padded."""
    if x.numel() == 0:
        return x.new_zeros(grid_shape(x.shape, block))
    extents = full_block(block, x.shape)
    for dim in reversed(range(x.dim())):
        size, extent = x.shape[dim], extents[dim]
        if extent == 1:
            continue
        if extent >= size:
            x = op(x, dim=dim, keepdim=True)
            continue
        count = size // extent
        whole = op(x.narrow(dim, 0, count * extent).unflatten(dim, (count, extent)), dim=dim + 1)
        if rest := size - count * extent:
            tail = op(x.narrow(dim, count * extent, rest), dim=dim, keepdim=True)
            whole = torch.cat([whole, tail], dim=dim)
        x = whole
    return x


def check_grid(grid: Tensor, shape: Sequence[int], block: Sequence[int]) -> None:
    """Raise `ConfigError` where a tensor does not have one element per block."""
    expected = grid_shape(shape, block)
    if tuple(grid.shape) != expected:
        raise ConfigError(
            f"a scale or zero of shape {tuple(grid.shape)} does not fit a tensor of shape "
            f"{tuple(shape)} in blocks of {tuple(block)}: it must have shape {expected}"
        )
