"""Blocks of a tensor as the rows of matrices of bounded size, and candidates for their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from operator import add

import torch
from torch import Tensor

from ao_core.numerics.affine import (
    choose_qparams,
    qparams_of_range,
    quant_max_of,
    scale_to_float,
    store_qparams,
    zero_to_float,
)
from ao_core.numerics.blocks import full_block
from ao_core.numerics.slabs import searched_at_once
from ao_core.records import DType
from ao_core.spec import Spec

__all__ = ["QParams", "Rows", "improve_qparams", "merge"]

#: how much more than others an error along the weights counts, a change of their length
_GAIN = 10.0
#: storage of scales that may be negative
_SIGNED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class QParams:
    """A scale and a zero point, in the domain of codes, for each row: (B, 1), float32, as stored."""

    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Blocks, one per row, and the format that they are to have."""

    #: (B, E) finite or not, any floating-point dtype
    x: Tensor
    dtype: DType
    spec: Spec
    #: columns that are worked on at a time
    width: int
    #: (B, E), by what the squared error of each element counts; None: all the same
    importance: Tensor | None = None

    def strips(self) -> Iterator[Tensor]:
        """The columns in float32, so many at a time."""
        for start in range(0, self.x.shape[1], self.width):
            yield self.x[:, start : start + self.width].to(torch.float32)

    def importances(self) -> Iterator[Tensor]:
        """`importance`, so many columns at a time, as `strips` has them."""
        assert self.importance is not None
        yield from self.importance.split(self.width, 1)

    def total(self, sums: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`sums`, of shape (B, 1) for a strip, added up over the strips in float64."""
        parts = zip(*map(sums, self.strips()), strict=True)
        return tuple(reduce(add, (part.to(torch.float64) for part in column)) for column in parts)

    def values(self, ratio: Tensor) -> Tensor:
        """The nearest values of the format; `ratio` is overwritten."""
        if self.dtype.kind == "int":  # what encode and decode give, in a quarter of the time
            return ratio.round_().clamp_(self.dtype.min, self.dtype.max)
        return self.dtype.decode(self.dtype.encode(ratio))

    def codes(self, x: Tensor, q: QParams) -> Tensor:
        """Of a strip: the values of the format that x / scale + zero rounds to."""
        ratio = x / q.scale
        return self.values(ratio if q.zero_point is None else ratio.add_(q.zero_point))

    def residual(self, x: Tensor, q: QParams) -> Tensor:
        """Of a strip: what dequantizing gives, less x."""
        values = self.codes(x, q)
        if q.zero_point is not None:
            values.sub_(q.zero_point)
        return values.mul_(q.scale).sub_(x)

    def errors(self, q: QParams, p: float = 2.0) -> tuple[Tensor, Tensor]:
        """Of each row: the sum of the squared errors, and the measure that searches make small.

        That is the sum of |error|**p where the part of the error along the weights counts
        1 + `_GAIN` times in the square: with e = Q(W) - W and g = e·W / |W|, for p = 2

            |e|**2 + _GAIN * g**2,

        and for other p the sum of |error|**p grows by the same factor, to the power p / 2.

        What is clipped or rounded towards zero in one block is so in all of them, and makes the
        whole layer's output smaller, while the rest of the errors averages out in sums over blocks
        and layers. That quantized weights are biased so, and are worth correcting, is in Banner et
        al. 2019 (arXiv:1810.05723, section 4.2); the unbiased scale |W|**2 / Q·W, the limit of a large
        `_GAIN` for given codes, in Vargaftik et al. 2021 (DRIVE, arXiv:2105.08339).
        """

        def sums(x: Tensor) -> tuple[Tensor, ...]:
            error = self.residual(x, q)
            along = _sum(error * x)
            squares = _sum(error.square() if p != 2 else error.square_())
            return squares, along, *((_sum(error.abs_().pow_(p)),) if p != 2 else ())

        return self._measure(p, *self.total(sums))

    def exact_errors(self, q: QParams, p: float = 2.0) -> tuple[Tensor, Tensor]:
        """`errors` with everything after dequantizing in float64."""

        def sums(x: Tensor) -> tuple[Tensor, ...]:
            ratio = x / q.scale if q.zero_point is None else x / q.scale + q.zero_point
            values = self.dtype.decode(self.dtype.encode(ratio))
            if q.zero_point is not None:
                values -= q.zero_point
            error = (values * q.scale).to(torch.float64) - x
            powers = () if p == 2 else (_sum(error.abs().pow_(p)),)
            return _sum(error.square()), _sum(error * x), *powers

        return self._measure(p, *self.total(sums))

    def _measure(
        self, p: float, squares: Tensor, along: Tensor, powers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        amplified = squares + _GAIN * _ratio(along.square(), self.square)
        if powers is None:
            return squares, amplified
        return squares, powers * _ratio(amplified, squares).pow(p / 2)

    def never_worse(self, new: QParams, old: QParams, p: float = 2.0) -> QParams:
        """The new ones where they are better, and no worse in squares, by `exact_errors`."""
        (old_squared, before), (new_squared, after) = (self.exact_errors(q, p) for q in (old, new))
        return merge((after < before) & (new_squared <= old_squared), new, old)

    @cached_property
    def square(self) -> Tensor:
        """|W|**2 of each row, float64."""
        return self.total(lambda x: (_sum(x * x),))[0]

    def of_range(self, low: Tensor, high: Tensor) -> QParams:
        """What `choose_qparams` gives for elements from `low` to `high`."""
        spec = self.spec
        mode, quant_max = str(spec.option("mx_mode", "floor")), quant_max_of(self.dtype, spec.block)
        found = qparams_of_range(
            low,
            high,
            self.dtype,
            spec.zero_point,
            spec.chosen_scale_dtype,
            mx_mode=mode,
            quant_max=quant_max,
        )
        return self.read(*found)

    def stored(self, scale: Tensor, zero_point: Tensor | None) -> QParams:
        """Float32 scales and zero points, rounded to what the storage has."""
        return self.read(
            *store_qparams(
                scale, zero_point, self.dtype, self.spec.zero_point, self.spec.chosen_scale_dtype
            )
        )

    def read(self, scale: Tensor, zero_point: Tensor | None) -> QParams:
        """Stored scales and zero points as numbers."""
        by = scale_to_float(scale)
        if zero_point is None:
            return QParams(by, None)
        point = zero_to_float(zero_point, self.dtype)
        return QParams(by, point / by if self.spec.zero_point == "offset" else point)

    @property
    def signs(self) -> tuple[float, ...]:
        """Signs of scales that are worth trying.

        Integers in two's complement reach one further below zero than above, so a negative scale
        serves blocks whose greatest magnitudes are positive.
        """
        uneven = self.dtype.kind == "int" and 0 < self.dtype.max < -self.dtype.min
        turns = (
            uneven and self.spec.zero_point == "none" and self.spec.chosen_scale_dtype in _SIGNED
        )
        return (1.0, -1.0) if turns else (1.0,)

    def range(self) -> tuple[Tensor, Tensor]:
        """Least and greatest element of each row."""
        low, high = torch.aminmax(self.x, dim=1, keepdim=True)
        return low.to(torch.float32), high.to(torch.float32)

    def fitted(self, q: QParams, target: Callable[[Tensor, QParams], Tensor] | None) -> QParams:
        """Scales and zero points of least squared error for the codes that `q` gives, as stored.

        Args:
            q: where it starts; kept where the codes of a row do not determine a scale of the same sign.
            target: (strip, q) -> what the codes are fitted to; None: the strip itself.
        """

        def sums(x: Tensor) -> tuple[Tensor, ...]:
            values = self.codes(x, q)
            goal = x if target is None else target(x, q)
            plain = (values * values, values * goal, values, goal)
            return tuple(map(_sum, (*plain, values * x, goal * x, x)))

        squares, products, values, goals, *along = self.total(sums)
        # inner products in which what is along the weights counts 1 + _GAIN times
        along_value, along_goal, along_one = (
            part * _ratio(_GAIN**0.5, self.square.sqrt()) for part in along
        )
        squares, products = squares + along_value**2, products + along_value * along_goal
        if q.zero_point is None:
            scale = _alike(products / squares, q.scale)
            return QParams(self.stored(scale.abs(), None).scale.copysign(q.scale), None)
        values, goals = values + along_value * along_one, goals + along_goal * along_one
        count = self.x.shape[1] + along_one**2
        slope = (products - values * goals / count) / (squares - values * values / count)
        zero_point = values / count - goals / count / _alike(slope, q.scale)
        point = self.stored(q.scale, zero_point.to(torch.float32)).zero_point
        assert point is not None
        # the slope again, for the zero point as it is stored
        slope = (products - point * goals) / (squares + point * (point * count - 2 * values))
        return QParams(self.stored(_alike(slope, q.scale), q.zero_point).scale, point)


def improve_qparams(
    x: Tensor,
    dtype: DType,
    spec: Spec,
    improve: Callable[[Rows, QParams], QParams],
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of every block: what `choose_qparams` gives, improved piece by piece.

    Memory beside the result is a few pieces of at most `searched_at_once`, and for a block that is larger
    and not contiguous a copy of it.

    Args:
        x: of any shape, in the layout's blocked shape.
        dtype: the number format.
        spec: block, storage of scales, kind of zero points and options are used.
        improve: (rows, where to start) -> the scales and zero points of those rows.
        importance: of each element, in the shape of x, which becomes `Rows.importance`.
    """
    mode = str(spec.option("mx_mode", "floor"))
    x = x.detach()
    scale, zero_point = choose_qparams(
        x, dtype, spec.block, spec.zero_point, spec.chosen_scale_dtype, mx_mode=mode
    )
    if x.numel() == 0:
        return scale, zero_point
    limit = searched_at_once(x.device)
    extents = full_block(spec.block, x.shape)
    for ranges in _pieces([(0, size) for size in x.shape], extents, limit):
        place = tuple(slice(a // e, -(-b // e)) for (a, b), e in zip(ranges, extents, strict=True))
        piece = tuple(slice(a, b) for a, b in ranges)
        matrix = _matrix(x[piece], extents)
        by = None if importance is None else _matrix(importance[piece], extents)
        if matrix.numel() <= limit:
            matrix = matrix.to(torch.float32)
        here = scale[place]
        point = None if zero_point is None else zero_point[place].reshape(-1, 1)
        rows = Rows(matrix, dtype, spec, limit, by)
        found = improve(rows, rows.read(here.reshape(-1, 1), point))
        scale[place] = found.scale.reshape(here.shape).to(scale.dtype)
        if zero_point is not None and found.zero_point is not None:
            point = (
                found.zero_point * found.scale if spec.zero_point == "offset" else found.zero_point
            )
            stored = dtype.encode(point) if spec.zero_point == "int" else point.to(zero_point.dtype)
            zero_point[place] = stored.reshape(here.shape)
    return scale, zero_point


def merge(better: Tensor, new: QParams, old: QParams) -> QParams:
    """The new ones where `better`, else the old ones."""
    zero_point = None
    if new.zero_point is not None and old.zero_point is not None:
        zero_point = torch.where(better, new.zero_point, old.zero_point)
    return QParams(torch.where(better, new.scale, old.scale), zero_point)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dim=1, keepdim=True)


def _ratio(value: Tensor | float, by: Tensor) -> Tensor:
    """The quotient; 0 where it would be by 0."""
    return torch.where(by == 0, 0.0, value / by)


def _alike(value: Tensor, otherwise: Tensor) -> Tensor:
    """Float32 where it is finite and of the sign of `otherwise`, else that."""
    value = value.to(torch.float32)
    same = value.sign() == otherwise.sign()
    return torch.where(same & torch.isfinite(value), value, otherwise)


def _pieces(
    ranges: list[tuple[int, int]], extents: Sequence[int], limit: int
) -> Iterator[list[tuple[int, int]]]:
    """A box cut into boxes of whole blocks of one shape, with at most `limit` elements or one block."""
    large = prod(b - a for a, b in ranges) > limit
    for i, ((a, b), extent) in enumerate(zip(ranges, extents, strict=True)):
        blocks = -(-(b - a) // extent)
        ragged = blocks > 1 and (b - a) % extent != 0
        if ragged or (large and blocks > 1):
            middle = a + extent * (blocks - 1 if ragged else blocks // 2)
            for half in ((a, middle), (middle, b)):
                yield from _pieces([*ranges[:i], half, *ranges[i + 1 :]], extents, limit)
            return
    yield ranges


def _matrix(x: Tensor, extents: Sequence[int]) -> Tensor:
    """A tensor of whole blocks as (blocks, elements of one)."""
    sizes = [
        part
        for size, extent in zip(x.shape, extents, strict=True)
        for part in (max(size // extent, 1), min(size, extent))
    ]
    order = [*range(0, len(sizes), 2), *range(1, len(sizes), 2)]
    matrix = x.reshape(sizes).permute(order).reshape(prod(sizes[::2]), prod(sizes[1::2]))
    return matrix.contiguous()  # sums depend on the order in memory
