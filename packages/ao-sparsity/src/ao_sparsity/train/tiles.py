"""Masks of 4 × 4 tiles that keep two in each row and each column: 2:4 of a matrix and of its transpose."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.ext import ConfigError, checked, shown

__all__ = ["TILE", "best_tiles", "patterns", "tile_mask"]

#: rows and columns of a tile
TILE = 4
#: tiles that are scored at a time, which bounds the memory: 90 sums for each
_AT_ONCE = 1 << 14


@cache
def patterns() -> tuple[tuple[int, ...], ...]:
    """The 90 ways to keep two in each row and each column of a tile, as one pair (0 to 5) a row.

    Pairs are those of `itertools.combinations(range(4), 2)`.
    """
    pairs = list(combinations(range(TILE), 2))
    found = []
    for rows in product(range(len(pairs)), repeat=TILE):
        columns = [column for pair in rows for column in pairs[pair]]
        if all(columns.count(column) == 2 for column in range(TILE)):
            found.append(rows)
    return tuple(found)


def best_tiles(scores: Tensor) -> Tensor:
    """For each tile, the pattern of `patterns` whose kept scores have the greatest sum.

    The sums are taken in the dtype of the scores, one addition after the other: pairs, then two rows,
    then both halves. Ties go to the first pattern.

    Args:
        scores: (4, 4, tiles), finite.

    Returns:
        True where a score is kept, (4, 4, tiles).
    """
    device = scores.device
    left, right = zip(*combinations(range(TILE), 2), strict=True)
    pairs = scores[:, list(left)] + scores[:, list(right)]
    upper, lower = ((pairs[i, :, None] + pairs[i + 1]).flatten(0, 1) for i in (0, 2))
    rows = torch.tensor(patterns(), device=device)
    count = len(left)
    sums = upper[rows[:, 0] * count + rows[:, 1]] + lower[rows[:, 2] * count + rows[:, 3]]
    best = rows[sums.max(0).indices]  # argmax along this dimension takes 20 times as long on a CPU
    kept = torch.zeros(count, TILE, dtype=torch.bool, device=device)
    for pair, columns in enumerate(zip(left, right, strict=True)):
        kept[pair, list(columns)] = True
    return kept[best].permute(1, 2, 0)


@checked
def tile_mask(weight: Tensor) -> Tensor:
    """True for what stays of a matrix, 2:4 along its rows and along its columns at once.

    Of each 4 × 4 tile the eight weights stay, two in each row and column, whose magnitudes have the
    greatest sum: the best of all 90 patterns. Tiles that stand out are filled with zeros. NaN and
    infinities stay wherever their number allows, so that they are seen.

    Args:
        weight: (N, K), any floating-point dtype; scores are in float32, or in float64 where it is.

    Raises:
        ConfigError: `weight` is no floating-point matrix.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ConfigError(f"weight={shown(weight)}: need a floating-point matrix (N, K)")
    n, k = weight.shape
    scores = weight.detach().abs()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    largest = torch.finfo(scores.dtype).max / 16  # the sum of eight is finite
    scores = scores.nan_to_num(nan=largest, posinf=largest).clamp(max=largest)
    filled = F.pad(scores, (0, -k % TILE, 0, -n % TILE))
    height, width = (size // TILE for size in filled.shape)
    tiled = filled.view(height, TILE, width, TILE).permute(1, 3, 0, 2)
    tiles = tiled.reshape(TILE, TILE, height * width)
    kept = torch.cat([best_tiles(some) for some in tiles.split(_AT_ONCE, -1)], -1)
    spread = kept.view(tiled.shape).permute(2, 0, 3, 1).reshape(filled.shape)
    return spread[:n, :k].contiguous()
