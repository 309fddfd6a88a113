"""Blocks of a tensor as the rows of a matrix, and what candidates for their scales would make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.numerics.allowed import SIGNED_SCALES
from ao_core.records import Call, DType
from ao_core.scales.stored import rounded_scale, rounded_zero
from ao_core.spec import ROW, Spec, blocks_of_numbers

__all__ = ["GAIN", "Found", "QParams", "Rows", "Sums", "measured", "share_of"]

#: how much more than others an error along the weights counts, a change of their length
GAIN = 10.0
_HUGE = 1e30


@dataclass(frozen=True)
class QParams:
    """Scales and zero points of each row: (B, C), float32, as stored."""

    #: negative ones turn the sign of codes
    scale: Tensor
    #: in the domain of codes; None: the format has none
    zero_point: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> QParams:
        """Both, changed in the same way."""
        point = self.zero_point
        return QParams(change(self.scale), None if point is None else change(point))

    def merged(self, better: Tensor, other: QParams) -> QParams:
        """The other ones where `better`, else these."""
        point = None
        if self.zero_point is not None and other.zero_point is not None:
            point = torch.where(better, other.zero_point, self.zero_point)
        return QParams(torch.where(better, other.scale, self.scale), point)


@dataclass(frozen=True)
class Sums:
    """Sums over the elements of each row, (B, C): of w e², w e x, w e and w |e|**power.

    e is the error of x, what dequantizing gives less x, and w its importance, 1 where there is none.
    """

    #: of w e²
    squares: Tensor
    #: of w e x
    along: Tensor
    #: of w e
    plain: Tensor
    #: of w |e|**power; None: no power was asked for
    powers: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Sums:
        """All of them, changed in the same way."""
        powers = None if self.powers is None else change(self.powers)
        return Sums(change(self.squares), change(self.along), change(self.plain), powers)


@dataclass(frozen=True)
class Found:
    """The best candidate of each row so far, all (B, 1)."""

    #: as stored
    q: QParams
    #: of their errors
    sums: Sums
    #: what the search makes small
    measure: Tensor

    def or_better(self, other: Found) -> Found:
        """The other one in the rows where it is better."""
        better = other.measure < self.measure
        mine, new = self.sums, other.sums
        sums = Sums(
            torch.where(better, new.squares, mine.squares),
            torch.where(better, new.along, mine.along),
            torch.where(better, new.plain, mine.plain),
        )
        measure = torch.where(better, other.measure, self.measure)
        return Found(self.q.merged(better, other.q), sums, measure)


def measured(sums: Sums, share: Tensor | None, power: float | None) -> Tensor:
    """What searches make small, (B, C): the squared error, where its part along the weights counts more.

    With the error e of weights W and g = e·W / |W| that is

        |e|**2 + gain * g**2,

    and with a power p the sum of |e|**p grows by the same factor, to the power p / 2.

    What is clipped or rounded towards zero in one block is so in all of them, and makes the
    whole layer's output smaller, while the rest of the errors averages out in sums over blocks
    and layers. That quantized weights are biased so, and are worth correcting, is in Banner et
    al. 2019 (arXiv:1810.05723, section 4.2); the unbiased scale |W|**2 / Q·W, the limit of a large
    gain for given codes, in Vargaftik et al. 2021 (DRIVE, arXiv:2105.08339).

    Args:
        sums: of each candidate.
        share: gain / |W|**2 of each row, (B, 1), as `share_of` has it; None: gain is 0.
        power: None: 2.
    """
    if share is None:
        return sums.squares
    amplified = torch.addcmul(sums.squares, share * sums.along, sums.along)
    if power is None or sums.powers is None:
        return amplified
    return sums.powers * (amplified / sums.squares).nan_to_num_(0.0).pow_(power / 2)


def share_of(square: Tensor, gain: float) -> Tensor | None:
    """The gain by |W|**2, the square of each row, (B, 1); 0 for a block of zeros. None where gain is 0."""
    return torch.where(square == 0, 0.0, gain / square) if gain else None


@dataclass(frozen=True)
class Rows:
    """Blocks, one per row, the format that they are to have, and the scales that a search starts with."""

    #: (B, E) finite or not, any floating-point dtype
    x: Tensor
    dtype: DType
    spec: Spec
    #: (B, 1)
    start: QParams
    #: (B, E), float32, by what the squared error of each element counts; None: all the same
    importance: Tensor | None = None
    #: how much more than others an error along the weights counts
    gain: float = GAIN
    #: of the errors that the measure adds up; None: 2
    power: float | None = None
    #: scales -> what they will be once they are quantized too
    nested: Callable[[Tensor], Tensor] | None = None
    #: (B, 1), powers of two that x and its scales have been divided by; None: by none
    unit: Tensor | None = None

    @cached_property
    def first(self) -> Found:
        """The start."""
        sums = Sums(*self._started[..., :1])
        return Found(self.start, sums, self.measure(sums))

    @cached_property
    def lost(self) -> Sums:
        """What a scale of 0 would give, (B, 1): the sums of w x², -w x² and -w x."""
        return Sums(*self._started[..., 1:])

    @cached_property
    def _started(self) -> Tensor:
        scale = torch.cat([self.start.scale, torch.zeros_like(self.start.scale)], 1)
        point = self.start.zero_point
        return self._sums(QParams(scale, None if point is None else torch.cat([point, point], 1)))

    def _sums(self, q: QParams) -> Tensor:
        spec = blocks_of_numbers(self.dtype.name, ROW, q.zero_point is not None)
        shape = tuple(self.x.shape)
        call = Call("scale_sums", spec, shape, shape, self.x.dtype, self.x.device.type)
        found: Tensor = run(call, self.x, q.scale, q.zero_point, self.importance, self.power, spec)
        return found

    def measure(self, sums: Sums) -> Tensor:
        """See `measured`."""
        return measured(sums, self._share, self.power)

    @cached_property
    def _share(self) -> Tensor | None:
        return share_of(self.lost.squares, self.gain)

    def best(self, q: QParams) -> Found:
        """The candidate of each row with the least measure, of those with no greater squares than the start.

        Where there is none, one with a huge measure.
        """
        sums = Sums(*self._sums(q))
        # what this adds is much larger than any measure; adding is much faster than `torch.where`
        excess = (sums.squares - self.first.sums.squares).clamp_(min=0.0)
        measure = torch.add(self.measure(sums), excess, alpha=_HUGE)
        if measure.shape[1] == 1:
            return Found(q, sums, measure)
        index = _least(measure)

        def pick(values: Tensor) -> Tensor:
            return values.gather(1, index)

        return Found(q.map(pick), sums.map(pick), pick(measure))

    def stored(self, scale: Tensor, zero_point: Callable[[Tensor], Tensor] | None) -> QParams:
        """Any scales, and zero points that follow from the rounded ones, as they are stored.

        Without zero points scales may be negative, and stay so.
        """
        size = self._whole(scale.abs() if zero_point is None else scale)
        size = rounded_scale(size, self.spec.chosen_scale_dtype)
        if self.nested is not None:
            size = self.nested(size)
        new = size if self.unit is None else size / self.unit
        if zero_point is None:
            return QParams(new.copysign(scale), None)
        return QParams(new, rounded_zero(zero_point(new), size, self.dtype, self.spec))

    def _whole(self, scale: Tensor) -> Tensor:
        """A scale of x as it was."""
        return scale if self.unit is None else scale * self.unit

    def scaled(self, q: QParams, low: Tensor, high: Tensor) -> QParams:
        """Candidates (B, C) whose ranges are those of `q` (B, 1), times factors (1, C) for each end.

        Without zero points the range has one end, whose factor is `high`, and may turn the sign of the
        scale.
        """
        if q.zero_point is None:
            return self.stored(q.scale * high, None)
        below, steps = q.zero_point - self.dtype.min, self.dtype.max - self.dtype.min
        span = torch.addcmul((steps - below) * high, below, low)
        start = q.scale * below * low
        return self.stored(span * (q.scale / steps), lambda scale: self.dtype.min + start / scale)

    @property
    def turns(self) -> bool:
        """Whether scales of either sign are worth trying.

        Integers in two's complement reach one further below zero than above, so a negative scale
        serves blocks whose greatest magnitudes are positive.
        """
        uneven = self.dtype.kind == "int" and 0 < self.dtype.max < -self.dtype.min
        allowed = self.nested is None and self.spec.chosen_scale_dtype in SIGNED_SCALES
        return uneven and allowed and self.spec.zero_point == "none"

    def fitted(self, found: Found) -> QParams:
        """Scales and zero points of least squares, as `measured` has them, for the codes of `found`.

        What dequantizing gives is y = e + x. With a zero point it becomes (1 + d) y + b, and then, for
        the zero point as it is stored, the best multiple. What the codes do not determine stays.
        """
        lost, scale, point = self.lost, found.q.scale, found.q.zero_point
        e2, ex, x2 = found.sums.squares, found.sums.along, lost.squares
        share = torch.zeros_like(x2) if self._share is None else self._share
        y2, yx = e2 + 2 * ex + x2, ex + x2
        square = y2 + share * yx * yx
        if point is None:
            return self.stored(_alike(scale * (yx * (1 + share * x2) / square), scale), None)
        e1, x1 = found.sums.plain, -lost.plain
        y1, mixed, count = e1 + x1, e1 + x1 + share * yx * x1, self._count
        level = count + share * x1 * x1
        grown, moved = -(e2 + ex + share * ex * yx), -(e1 + share * ex * x1)
        determinant = square * level - mixed * mixed
        by = _alike(scale * (1 + (grown * level - moved * mixed) / determinant), scale)
        shift = (moved * square - grown * mixed) / determinant / by
        wanted = torch.where(shift.isfinite(), point - shift, point)
        new = rounded_zero(wanted, self._whole(by), self.dtype, self.spec)
        change = scale * (point - new)
        y2, yx = y2 + change * (2 * y1 + change * count), yx + change * x1
        by = _alike(scale * (yx * (1 + share * x2) / (y2 + share * yx * yx)), scale)
        return self.stored(by, lambda _: new)

    @cached_property
    def _count(self) -> Tensor | int:
        """The sum of importances of each row."""
        if self.importance is None:
            return self.x.shape[1]
        return self.importance.sum(1, keepdim=True)


def _least(measure: Tensor) -> Tensor:
    """The column of the least number of each row, (B, 1), to a few digits; numbers are not negative.

    As integers their bits are in the same order: the lowest ones make room for the column.
    """
    count = measure.shape[1]
    mask = (1 << (count - 1).bit_length()) - 1
    columns = torch.arange(count, dtype=torch.int32, device=measure.device)
    bits = (measure.view(torch.int32) & ~mask).bitwise_or_(columns)
    return bits.amin(1, keepdim=True).bitwise_and_(mask).to(torch.int64)


def _alike(value: Tensor, otherwise: Tensor) -> Tensor:
    """The value where it is finite and of the sign of `otherwise`, else that."""
    ratio = value / otherwise
    return torch.where((ratio > 0) & (ratio < torch.inf), value, otherwise)
