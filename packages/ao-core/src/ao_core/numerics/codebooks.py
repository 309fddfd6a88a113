"""Learned codebooks: the values of a block's codes are chosen for its elements, by k-means.

A codebook grid is a grid with one more dimension, the last: the values of the codes, never decreasing. All
arithmetic is in float32, except for sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.numerics.blocks import expand, full_block, grid_shape

__all__ = ["decode_codebooks", "encode_codebooks", "learn_codebooks"]

#: rounds of k-means, more than most blocks need to settle
_ROUNDS = 50
#: elements that are learned from at a time, where blocks allow it: each needs about 30 bytes
_CHUNK = 1 << 24


def learn_codebooks(
    x: Tensor, block: Sequence[int], bits: int, importance: Tensor | None = None
) -> Tensor:
    """The float32 codebook grid [..., 2**bits] that k-means finds for the elements of every block.

    Lloyd's algorithm (1982), from the values that are spaced as those of the best quantizer of a normal
    distribution with the block's mean and deviation are in the limit (Panter and Dite 1951), so without a
    random start. The sum of squared errors only falls. A block with a NaN has a codebook of NaN.

    With the importance of each element, positive and in the shape of `x`, it goes on from there with the sum
    of importance · error².
    """
    rows = max(_CHUNK // max(x[:1].numel(), 1), 1)
    if x.shape[0] > rows and full_block(block, x.shape)[0] == 1:
        weights = [None] * x.shape[0] if importance is None else importance.split(rows)
        parts = zip(x.split(rows), weights, strict=False)
        return torch.cat([learn_codebooks(part, block, bits, by) for part, by in parts])
    # one block per row, in order; what pads it is infinite, and comes last
    ordered, places_ = _by_block(x.detach().to(torch.float32), block, torch.inf).sort(-1)
    inside = ordered < torch.inf
    count = inside.sum(-1, keepdim=True)
    # so that no square leaves the range of float32; NaN comes last too
    size = torch.where(inside, ordered.abs(), 0.0).amax(-1, keepdim=True)
    size = torch.where(ordered.isnan().any(-1, keepdim=True), torch.nan, size)
    ordered = ordered / torch.where(size == 0, 1.0, size)
    elements = torch.where(inside, ordered, 0.0).double()
    sums = F.pad(elements.cumsum(-1), (1, 0))
    mean = sums[:, -1:] / count.clamp(min=1)
    squares = (torch.where(inside, elements - mean, 0.0)).square().sum(-1, keepdim=True)
    places = (torch.arange(1 << bits, device=x.device, dtype=torch.float64) + 0.5) / (1 << bits)
    spread: Tensor = torch.special.ndtri(places) * (3 * squares / count.clamp(min=1)).sqrt()
    codebooks = (mean + spread).float()
    for _ in range(_ROUNDS):
        codebooks = _improved(ordered, sums, count, codebooks)
    if importance is not None:
        by = _by_block(importance.double(), block, 0.0).gather(-1, places_)
        totals, weights_ = (F.pad(v.cumsum(-1), (1, 0)) for v in (elements * by, by))
        for _ in range(_ROUNDS):
            codebooks = _improved(ordered, totals, count, codebooks, weights_)
    return (codebooks * size).reshape(*grid_shape(x.shape, block), 1 << bits)


def _improved(
    ordered: Tensor,
    sums: Tensor,
    count: Tensor,
    codebooks: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """One round: values move to the mean of the elements that are nearest to them.

    A value without any, one of a block at a time, moves to the element that is farthest from its own.

    With running sums of `weights`, `sums` are those of the weighted elements, and means are weighted.
    """
    # elements from one end to the next belong to one value; those in between need not be looked at
    ends = torch.searchsorted(ordered, _middles(codebooks), right=True)
    ends = torch.cat([torch.zeros_like(count), ends, count], -1)
    number = ends.diff(dim=-1)
    total = sums.gather(-1, ends).diff(dim=-1)
    by = number.clamp(min=1) if weights is None else weights.gather(-1, ends).diff(dim=-1)
    moved = torch.where(number == 0, codebooks, (total / by).float())
    if weights is not None:  # outliers that hardly count are none
        return moved.sort(-1).values
    first_and_last = torch.cat([ends[:, :-1], ends[:, 1:] - 1], -1).clamp(0, ordered.shape[-1] - 1)
    outer = ordered.gather(-1, first_and_last)
    error = torch.where(number.repeat(1, 2) > 0, (outer - moved.repeat(1, 2)).abs(), 0.0)
    worst, where = error.max(-1, keepdim=True)
    fewest, unused = number.min(-1, keepdim=True)
    better = (fewest == 0) & (worst > 0)
    value = torch.where(better, outer.gather(-1, where), moved.gather(-1, unused))
    return moved.scatter(-1, unused, value).sort(-1).values


def encode_codebooks(x: Tensor, block: Sequence[int], codebooks: Tensor) -> Tensor:
    """Codes (uint8, shape of `x`) of the nearest value of each block's codebook.

    A tie goes to the lower value; NaN is encoded as 0.0 is.

    Args:
        x: floating-point values.
        block: extents along the last dimensions.
        codebooks: (*grid_shape(x.shape, block), 2**bits), increasing along the last dimension.
    """
    x = x.detach().to(torch.float32).nan_to_num(0.0)
    middles = _middles(codebooks.to(torch.float32).reshape(-1, codebooks.shape[-1]))
    codes = torch.searchsorted(middles, _by_block(x, block, 0.0), out_int32=True)
    return _from_block(codes.to(torch.uint8), x.shape, block)


def decode_codebooks(codes: Tensor, block: Sequence[int], codebooks: Tensor) -> Tensor:
    """The value (float32, shape of `codes`) of each code in the codebook of its block.

    The arguments are those of `encode_codebooks`.
    """
    count, levels = codebooks.shape[:-1].numel(), codebooks.shape[-1]
    dtype = torch.int32 if count < 1 << 23 else torch.int64
    start = torch.arange(0, count * levels, levels, dtype=dtype, device=codes.device)
    slot = expand(start.reshape(codebooks.shape[:-1]), codes.shape, block) + codes
    values = codebooks.to(torch.float32).reshape(-1).index_select(0, slot.reshape(-1))
    return values.reshape(codes.shape)


def _middles(codebooks: Tensor) -> Tensor:
    """Between neighbouring values; halves, because their sum may leave the range."""
    return codebooks[..., 1:] * 0.5 + codebooks[..., :-1] * 0.5


def _sizes(shape: Sequence[int], block: Sequence[int]) -> list[tuple[int, int]]:
    """(blocks, extent of a block) along each dimension."""
    return list(zip(grid_shape(shape, block), full_block(block, shape), strict=True))


def _by_block(x: Tensor, block: Sequence[int], fill: float) -> Tensor:
    """The elements of every block in a row of its own, those of incomplete ones padded."""
    sizes = _sizes(x.shape, block)
    missing = [n * extent - size for (n, extent), size in zip(sizes, x.shape, strict=True)]
    if any(missing):
        x = F.pad(x, [pad for m in reversed(missing) for pad in (0, m)], value=fill)
    ndim = len(sizes)
    x = x.reshape([size for pair in sizes for size in pair])
    x = x.permute(*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2))
    blocks, extents = (torch.Size(side).numel() for side in zip(*sizes, strict=True))
    return x.reshape(blocks, extents).contiguous()


def _from_block(rows: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Inverse of `_by_block`: the elements in `shape`, without what padded them."""
    sizes = _sizes(shape, block)
    ndim = len(sizes)
    x = rows.reshape([n for n, _ in sizes] + [extent for _, extent in sizes])
    x = x.permute([d + ndim * side for d in range(ndim) for side in (0, 1)])
    x = x.reshape([n * extent for n, extent in sizes])
    for dim, size in enumerate(shape):
        x = x.narrow(dim, 0, size)
    return x.contiguous()
