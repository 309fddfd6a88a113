"""Rows of activations that products are computed with: a sample, and the greatest ones.

Which rows these are depends on what is in them, not on when they were seen. So batches in any order, and
ranks that are merged, give the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ao_core.ext.calibration import State, Statistic

__all__ = ["ROWS"]

#: (rows, hashes) -> those that stay
Take = Callable[[Tensor, Tensor], State]

#: rows of a sample, and of the greatest ones
_COUNT, _GREATEST = 64, 16
#: elements of a row, evenly spread, that its hash is of
_HASHED = 64


def _hashes(rows: Tensor) -> Tensor:
    """One int64 per row (rows, in), of the bits of its elements in float32; the same for equal rows."""
    some = rows[:, :: max(1, rows.shape[1] // _HASHED)].to(torch.float32) + 0.0  # -0 is 0
    bits = some.contiguous().view(torch.int32).long()
    x = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for column in bits.unbind(1):
        x = _mixed(x + column)
    return x


def _mixed(x: Tensor) -> Tensor:
    """A step of SplitMix64 (Steele, Lea and Flood 2014) without its last shifts."""
    x = x * -7046029254386353131 + 1442695040888963407
    return (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687


def _distinct(rows: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows, the greatest priority first, and the priorities, which are hashes."""
    found, order = priority.sort(descending=True, stable=True)
    is_new = torch.ones_like(found, dtype=torch.bool)
    is_new[1:] = found[1:] != found[:-1]
    return rows[order[is_new]], found[is_new]


def _sample(rows: Tensor, priority: Tensor) -> State:
    rows, priority = _distinct(rows, priority)
    return {"sample": rows[:_COUNT], "priority": priority[:_COUNT]}


def _greatest(rows: Tensor, priority: Tensor) -> State:
    rows, priority = _distinct(rows, priority)
    order = rows.abs().amax(-1).sort(descending=True, stable=True).indices[:_GREATEST]
    return {"greatest": rows[order], "hash": priority[order]}


def _of(rows: Tensor, before: int, take: Take) -> State:
    return take(rows, _hashes(rows))


def _merged(a: State, b: State, keys: tuple[str, str], take: Take) -> State:
    return take(*(torch.cat([a[key], b[key]]) for key in keys))


def _statistic(name: str, keys: tuple[str, str], take: Take) -> Statistic:
    return Statistic(name, keys, partial(_of, take=take), partial(_merged, keys=keys, take=take))


#: Statistics of the activations of each weight: "sample", up to 64 distinct rows (count, in), and "greatest",
#: up to 16 with the largest magnitudes, since a sample may miss the tokens that an observer clips.
ROWS = (
    _statistic(f"distinct_rows({_COUNT})", ("sample", "priority"), _sample),
    _statistic(f"greatest_rows({_GREATEST})", ("greatest", "hash"), _greatest),
)
