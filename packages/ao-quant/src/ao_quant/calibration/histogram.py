"""A histogram over the numbers of bfloat16: exact counts of rounded values, and a range that grows.

A bin holds what rounds to one bfloat16 number, so its relative width is 2**-7 wherever the largest values
lie, and an outlier does not make the bins of all others wide. Of each sign there are 32 octaves below the
largest magnitude, and one bin for what is less. When larger values arrive, the octaves move up and the lowest
are added to that bin; so the counts do not depend on the order of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Histogram", "added", "count_bins", "points", "quantile"]

#: bfloat16 numbers in an octave, octaves that are kept, and bins of one sign: the first for what is less
_STEPS, _OCTAVES = 128, 32
_BINS = 1 + _STEPS * _OCTAVES
#: bits of the largest finite bfloat16 number
_LAST = 0x7F7F
#: values that are counted at a time
_SLAB = 1 << 22
#: points by which `points` stands for a bin, in widths of it from its middle
_SPREAD = (-0.375, -0.125, 0.125, 0.375)


@dataclass(frozen=True)
class Histogram:
    """How many values round to each number; nothing seen yet by default."""

    #: int64 (2, bins): of numbers that are not negative, and of those that are, by magnitude
    counts: Tensor
    #: the highest octave, as the exponent field of bfloat16
    top: int = 0

    @classmethod
    def empty(cls) -> Histogram:
        """A histogram of nothing."""
        return cls(torch.zeros(2, _BINS, dtype=torch.int64, device="cpu"))

    @property
    def nbytes(self) -> int:
        """Memory of the counts: 64 KiB."""
        return self.counts.nbytes


def count_bins(histogram: Histogram, x: Tensor, magnitude: float) -> Histogram:
    """The histogram with finite values `x`, whose largest magnitude is given, added to it."""
    top = max(histogram.top, int(_codes(torch.tensor([magnitude], device="cpu"))) // _STEPS)
    counts = _moved(histogram.counts, (top - histogram.top) * _STEPS).to(x.device)
    for slab in x.reshape(-1).split(_SLAB):
        place = (_codes(slab) - _lowest(top)).clamp_(min=-1) + 1
        place += torch.signbit(slab) * _BINS
        counts = counts + torch.bincount(place, minlength=2 * _BINS).view(2, _BINS)
    return Histogram(counts, top)


def added(a: Histogram, b: Histogram) -> Histogram:
    """The histogram of the values of both."""
    top = max(a.top, b.top)
    first, second = (_moved(each.counts, (top - each.top) * _STEPS) for each in (a, b))
    return Histogram(first.to(second.device) + second, top)


def points(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Values (float64, ascending) that stand for what was seen, each with its weight.

    Four for a bin, evenly spread over it, since values need not be bfloat16 numbers.
    """
    values, widths, counts = _bins(histogram)
    spread = torch.tensor(_SPREAD, dtype=torch.float64, device="cpu")
    weights = counts.double().repeat_interleave(len(spread)) / len(spread)
    return (values[:, None] + widths[:, None] * spread).reshape(-1), weights


def quantile(histogram: Histogram, share: float, *, magnitude: bool = False) -> float:
    """The bfloat16 number that the value at a share (0 to 1) of what was seen, in order, rounds to.

    With `magnitude`, of magnitudes in place of values.
    """
    values, _, counts = _bins(histogram)
    if magnitude:
        values, order = values.abs().sort()
        counts = counts[order]
    seen = counts.cumsum(0)
    rank = torch.tensor([int(share * (int(seen[-1]) - 1))], device="cpu")
    return float(values[torch.searchsorted(seen, rank, right=True)])


def _codes(x: Tensor) -> Tensor:
    """Bits of the bfloat16 number that each magnitude rounds to, ties away from 0; int32."""
    bits = x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF
    return ((bits + 0x8000) >> 16).clamp_(max=_LAST)


def _lowest(top: int) -> int:
    """Bits of the number of the second bin."""
    return (top - _OCTAVES + 1) * _STEPS


def _moved(counts: Tensor, steps: int) -> Tensor:
    """Counts of bins that begin some steps higher; all below go to the first bin."""
    steps = min(steps, _BINS - 1)
    out = torch.zeros_like(counts)
    out[:, 0] = counts[:, : steps + 1].sum(1)
    out[:, 1 : _BINS - steps] = counts[:, steps + 1 :]
    return out


def _bins(histogram: Histogram) -> tuple[Tensor, Tensor, Tensor]:
    """Middle, width (float64) and count of the bins that are not empty, in ascending order."""
    codes = (
        torch.arange(_BINS - 1, dtype=torch.int32, device="cpu") + _lowest(histogram.top)
    ).clamp_(min=0)
    middle = torch.cat([torch.zeros(1, device="cpu"), (codes << 16).view(torch.float32)]).double()
    octave = torch.cat(
        [torch.zeros(1, device="cpu"), ((codes & ~(_STEPS - 1)) << 16).view(torch.float32)]
    )
    width = octave.double() / _STEPS
    counts = histogram.counts.cpu()
    values = torch.cat([-middle.flip(0), middle])
    counts = torch.cat([counts[1].flip(0), counts[0]])
    used = counts > 0
    return values[used], torch.cat([width.flip(0), width])[used], counts[used]
