"""Which weights stay: boolean masks from scores, exact in number. Pure functions on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "best_blocks",
    "block_mask",
    "block_scores",
    "greatest_mask",
    "n_of_m_mask",
    "spread_blocks",
    "vector_norm",
]


def greatest_mask(scores: Tensor, kept: int) -> Tensor:
    """True for the `kept` greatest scores along the last dimension; ties go to the first.

    Args:
        scores: any shape (..., K); NaN counts as the greatest.
        kept: how many, 0 to K.
    """
    count = scores.shape[-1]
    if not 0 < kept < count:
        return torch.full_like(scores, kept > 0, dtype=torch.bool)
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    least = scores.kthvalue(count - kept + 1, dim=-1, keepdim=True).values
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(-1) <= kept - above.sum(-1, keepdim=True)))


def n_of_m_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """True for the `n` greatest of every `m` scores along the last dimension; ties go to the first.

    A last group of fewer than `m` is filled up with what is never kept, so it keeps at most `n` too.

    Args:
        scores: any shape (..., K); NaN counts as infinity.
        n: how many are kept, 0 to `m`.
        m: size of a group, 1 to 255.

    Raises:
        ValueError: `n` is not in 0 to `m`, or `m` is not in 1 to 255.
    """
    if not 1 <= m <= 255 or not 0 <= n <= m:
        raise ValueError(f"n={n}, m={m}: need 0 <= n <= m and 1 <= m <= 255")
    k = scores.shape[-1]
    groups = ceil(k / m)
    scores = scores if scores.is_floating_point() else scores.double()
    numbers = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    padded = F.pad(numbers, (0, groups * m - k), value=-torch.inf)
    lanes = padded.unflatten(-1, (groups, m)).unbind(-1)
    # how many of the group come before each: few comparisons cost less than to sort
    ranks = [torch.zeros(lane.shape, dtype=torch.uint8, device=lane.device) for lane in lanes]
    for (i, first), (j, second) in combinations(enumerate(lanes), 2):
        earlier = first >= second
        ranks[j] += earlier
        ranks[i] += ~earlier
    return torch.stack([rank < n for rank in ranks], -1).flatten(-2)[..., :k]


def block_scores(weight: Tensor, block: tuple[int, int], order: float = 2.0) -> Tensor:
    """The L`order` norm (float64) of every block of (..., N, K); what stands out counts as zeros.

    Returns:
        (..., ceil(N / rows), ceil(K / columns)).
    """
    rows, columns = block
    n, k = weight.shape[-2:]
    filled = F.pad(weight, (0, -k % columns, 0, -n % rows))
    tiled = filled.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return vector_norm(tiled, order, (-3, -1))


def vector_norm(x: Tensor, order: float, dim: int | tuple[int, ...]) -> Tensor:
    """The L`order` norm over some dimensions, in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, ord=order, dim=dim, dtype=torch.float64)
    return norm


def block_mask(weight: Tensor, block: tuple[int, int], sparsity: float) -> Tensor:
    """True for whole blocks of (N, K): those of the greatest L2 norm, exactly so many of them.

    Args:
        weight: a matrix.
        block: rows and columns of a block.
        sparsity: the share of blocks that go, rounded to the nearest whole number of them.

    Raises:
        ValueError: `sparsity` is not in 0 to 1.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity={sparsity}: need a share from 0 to 1")
    scores = block_scores(weight, block)
    kept = best_blocks(scores, round(sparsity * scores.numel()))
    return spread_blocks(kept, block, weight.shape)


def best_blocks(scores: Tensor, gone: int) -> Tensor:
    """True for the scores (..., R, C) of each matrix but the `gone` least of them; ties: the first stay."""
    flat = scores.flatten(-2)
    return greatest_mask(flat, flat.shape[-1] - gone).view(scores.shape)


def spread_blocks(grid: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """The value (..., R, C) of each block at all of its elements, cut to `shape` (..., N, K)."""
    rows, columns = block
    spread: Tensor = grid.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return spread[..., : shape[-2], : shape[-1]]
