"""Errors of blocks in float64, and the choice between two scales by them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core.numerics.slabs import searched_at_once
from ao_core.scales.rows import QParams, Rows, Sums, measured, share_of

__all__ = ["exact_errors", "never_worse", "surely_better"]

#: sums in float32 are right to a much smaller part than this …
_CERTAIN = 2e-4
#: … unless squares are so small that some have lost digits
_LEAST = 1e-28


def surely_better(rows: Rows, found: QParams) -> Tensor:
    """Where sums in float32 differ from those of the start by much more than they are wrong, (B, 1)."""
    first = rows.first
    again = rows.best(found)  # of one candidate, without doubt near ties
    better = again.sums.squares < (1 - _CERTAIN) * first.sums.squares
    better &= again.measure < (1 - _CERTAIN) * first.measure
    return better & (first.sums.squares > _LEAST)


def never_worse(rows: Rows, found: QParams, better: Tensor) -> QParams:
    """What was found where it is better than the start, and no worse in squares, by `exact_errors`.

    Where `surely_better` has decided, these are not asked.
    """
    start = rows.start
    changed = found.scale != start.scale
    if start.zero_point is not None and found.zero_point is not None:
        changed |= found.zero_point != start.zero_point
    better = changed & better
    doubtful = (changed & ~better).squeeze(1).nonzero().squeeze(1)
    if len(doubtful):
        importance = None if rows.importance is None else rows.importance[doubtful]
        few = replace(rows, x=rows.x[doubtful], importance=importance)
        old, new = (
            exact_errors(few, q.map(lambda values: values[doubtful])) for q in (start, found)
        )
        better[doubtful] = (new[1] < old[1]) & (new[0] <= old[0])
    return start.merged(better, found)


def exact_errors(rows: Rows, q: QParams) -> tuple[Tensor, Tensor]:
    """Of each row, (B, 1), the sum of importance · error² and the measure of `rows`.

    What dequantizing gives is in float32, all else in float64.

    Args:
        rows: any; where their search starts does not matter.
        q: of each row, (B, 1).
    """
    count, columns = rows.x.shape
    width = max(searched_at_once(rows.x.device) // count, 1)
    total = torch.zeros(5, count, 1, dtype=torch.float64, device=rows.x.device)
    for begin in range(0, columns, width):
        x = rows.x[:, begin : begin + width].to(torch.float32)
        ratio = x / q.scale if q.zero_point is None else x / q.scale + q.zero_point
        values = rows.dtype.decode(rows.dtype.encode(ratio))
        if q.zero_point is not None:
            values -= q.zero_point
        error = (values * q.scale).to(torch.float64) - x
        weight = None if rows.importance is None else rows.importance[:, begin : begin + width]
        counted, wide = error if weight is None else error * weight, x.to(torch.float64)
        total[0] += (counted * error).sum(1, keepdim=True)
        total[1] += (counted * wide).sum(1, keepdim=True)
        total[3] += (wide * wide if weight is None else wide * wide * weight).sum(1, keepdim=True)
        if rows.power is not None:
            powers = error.abs().pow_(rows.power)
            total[4] += (powers if weight is None else powers * weight).sum(1, keepdim=True)
    sums = Sums(total[0], total[1], total[2], None if rows.power is None else total[4])
    return sums.squares, measured(sums, share_of(total[3], rows.gain), rows.power)
