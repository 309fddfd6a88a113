"""The types of GGUF whose scales are searched: those with super-blocks, and iq4_nl.

Codes are chosen for some scales around the one that the range of a block gives, the scale (and the minimum)
of least squared error for these codes follows by linear regression, and the best of all is kept. In a
super-block scales become integers; then the integers and their float16 scale are fitted in turn, each only
where it lowers the squared error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import DType, Spec
from ao_core.ext import registry
from ao_quant.gguf.rounding import Blocks, Steps, half

__all__ = ["searched"]

#: by how many codes the range of a block is stretched, or clipped, to find candidates for its scale
_STRETCH = tuple(-1.8 + 0.3 * k for k in range(12))
#: of fitting the integers of a super-block, and their scale
_ROUNDS = 3


class Grid(NamedTuple):
    """Scales, or minima, of blocks: `codes` (G, S, 1) times `of` (G, 1, 1), float32 as they are stored."""

    codes: Tensor
    of: Tensor

    @property
    def values(self) -> Tensor:
        """One for each block."""
        return self.codes * self.of

    def where(self, better: Tensor, other: Grid) -> Grid:
        """`other` for the super-blocks that are better, or its codes alone for the blocks that are."""
        any_block = better.any(1, keepdim=True)
        return Grid(
            torch.where(better, other.codes, self.codes), torch.where(any_block, other.of, self.of)
        )


class Found(NamedTuple):
    """Scales and minima of blocks; what takes a minimum off has none where `low` is None."""

    scale: Grid
    low: Grid | None


class Goal(NamedTuple):
    """What the error is measured against."""

    #: (G, S, E)
    x: Tensor
    #: by what the squared error of each element counts, in the same shape; None: all the same
    by: Tensor | None

    def weighted(self, values: Tensor) -> Tensor:
        """Values of elements, times what these count."""
        return values if self.by is None else values * self.by

    @property
    def total(self) -> Tensor | int:
        """The elements of a block, or what they count together."""
        return self.x.shape[-1] if self.by is None else self.by.sum(-1, keepdim=True)


def searched(x: Tensor, dtype: DType, nested: Spec | None, by: Tensor | None = None) -> Blocks:
    """Blocks (G, S, E) near the least squared error, with a minimum for formats of no sign.

    `by`: by what the squared error of each element counts; None: all the same.
    """
    fmt = None if nested is None else registry.dtypes.get(nested.dtype)
    goal = Goal(x, by)
    scale, low = _best(goal, dtype, any_sign=nested is None)
    found = Found(_to_grid(scale, fmt), None if low is None else _to_grid(low, fmt))
    for _ in range(_ROUNDS):
        if fmt is not None:
            found = _better(goal, dtype, found, _new_codes(goal, dtype, fmt, found), (2,))
        found = _better(goal, dtype, found, _new_scales(goal, dtype, found), (1, 2))
    codes = _nearest(x, dtype, *_values(found))
    zero_point = None if found.low is None else _steps(found.low, fmt)
    return Blocks(dtype.encode(codes), _steps(found.scale, fmt), zero_point)


def _values(found: Found) -> tuple[Tensor, Tensor | None]:
    return found.scale.values, None if found.low is None else found.low.values


def _steps(grid: Grid, fmt: DType | None) -> Steps:
    codes = None if fmt is None else fmt.encode(grid.codes.squeeze(-1))
    return Steps(codes, half(grid.of.squeeze(-1)))


# -- one block -------------------------------------------------------------------------------------


def _nearest(x: Tensor, dtype: DType, scale: Tensor, low: Tensor | None) -> Tensor:
    """The values of the format that stand for `x`, least ones where the scale is 0."""
    ratio = (x if low is None else x + low) / torch.where(scale == 0, torch.inf, scale)
    if dtype.kind == "int":
        return ratio.round_().clamp_(dtype.min, dtype.max)
    return dtype.decode(dtype.encode(ratio))


def _error(
    goal: Goal, dtype: DType, scale: Tensor, low: Tensor | None, dims: tuple[int, ...]
) -> Tensor:
    """Sums of the squared errors."""
    q = _nearest(goal.x, dtype, scale, low)
    return _squares(goal, q, scale, low).sum(dims, keepdim=True)


def _squares(goal: Goal, q: Tensor, scale: Tensor, low: Tensor | None) -> Tensor:
    """The squared error of each element whose value of the format is in `q`."""
    residual = (q * scale).sub_(goal.x)
    return goal.weighted((residual if low is None else residual.sub_(low)).square_())


def _best(goal: Goal, dtype: DType, any_sign: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of each block, (G, S, 1), not rounded to what is stored.

    `any_sign`: whether a minimum may be above zero; those that are multiples of integers are not.
    """
    x = goal.x
    scale, low = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    error = torch.full_like(scale, torch.inf)
    for at, under in _candidates(x, dtype, any_sign):
        q = _nearest(x, dtype, at, under)
        new, new_low = _regression(goal, q, under is not None, any_sign)
        new_error = _squares(goal, q, new, new_low).sum(-1, keepdim=True)
        better = new_error < error
        error, scale = torch.where(better, new_error, error), torch.where(better, new, scale)
        if new_low is not None:
            low = torch.where(better, new_low, low)
    return scale, low if dtype.min == 0 else None


def _candidates(x: Tensor, dtype: DType, any_sign: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales, and minima, that put the extremes of a block near those of the format."""
    if dtype.min == 0:  # a minimum is never negative, since integers of no sign are its multiples
        low = x.amin(-1, keepdim=True).clamp(max=torch.inf if any_sign else 0.0)
        span = x.amax(-1, keepdim=True) - low
        for codes in _STRETCH:
            yield span / (dtype.max + codes), -low
        return
    greatest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    for end in (dtype.min, dtype.max):
        for codes in _STRETCH:
            yield greatest / (end * (1.0 + codes / (1 << (dtype.bits - 1)))), None


def _regression(
    goal: Goal, q: Tensor, ranged: bool, any_sign: bool
) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum, or the scale alone, of least squared error for the values `q` of the format."""
    x, p = goal.x, goal.weighted(q)
    squares, products = (p * q).sum(-1, keepdim=True), (p * x).sum(-1, keepdim=True)
    alone = torch.where(squares > 0, products / squares, 0.0)
    if not ranged:
        return alone, None
    count, values = goal.total, p.sum(-1, keepdim=True)
    goals = goal.weighted(x).sum(-1, keepdim=True)
    spread = count * squares - values * values
    scale = torch.where(spread > 0, (count * products - values * goals) / spread, 0.0)
    low = (scale * values - goals) / count
    inside = (scale > 0 if any_sign else low >= 0) & (scale >= 0)
    return torch.where(inside, scale, alone.clamp(min=0.0)), torch.where(inside, low, 0.0)


# -- super-blocks ----------------------------------------------------------------------------------


def _to_grid(values: Tensor, fmt: DType | None) -> Grid:
    """Scales or minima as they are stored: the greatest magnitude gets the farthest code."""
    if fmt is None:
        return Grid(torch.ones_like(values), half(values).float())
    greatest = values.gather(1, values.abs().argmax(1, keepdim=True))
    of = half(greatest / (fmt.min or fmt.max)).float()
    return Grid(_multiples(values, of, fmt), of)


def _multiples(values: Tensor, of: Tensor, fmt: DType) -> Tensor:
    """The codes whose multiples of `of` are nearest, 0 where that is 0."""
    return (values / torch.where(of == 0, torch.inf, of)).round().clamp(fmt.min, fmt.max)


def _new_codes(goal: Goal, dtype: DType, fmt: DType, found: Found) -> Found:
    """Other integers for the scale and the minimum of each block, their own scales as they are."""
    q = _nearest(goal.x, dtype, *_values(found))
    scale, low = _regression(goal, q, found.low is not None, any_sign=False)
    new = Grid(_multiples(scale, found.scale.of, fmt), found.scale.of)
    if found.low is None or low is None:
        return Found(new, None)
    return Found(new, Grid(_multiples(low, found.low.of, fmt), found.low.of))


def _new_scales(goal: Goal, dtype: DType, found: Found) -> Found:
    """Other float16 scales for the integers of each super-block: least squares again."""

    def total(products: Tensor) -> Tensor:
        return products.sum((1, 2), keepdim=True)

    x = goal.x
    a = _nearest(x, dtype, *_values(found)) * found.scale.codes
    weighted = goal.weighted(a)
    aa, ax = total(weighted * a), total(weighted * x)
    if found.low is None:
        return Found(Grid(found.scale.codes, half(ax / aa).float()), None)
    b = found.low.codes
    ab, bx = total(weighted * b), total(goal.weighted(x) * b)
    bb = total(b * b * goal.total)
    spread = aa * bb - ab * ab
    scale, low = (ax * bb - ab * bx) / spread, (ab * ax - aa * bx) / spread
    return Found(
        Grid(found.scale.codes, half(scale).float()), Grid(found.low.codes, half(low).float())
    )


def _better(goal: Goal, dtype: DType, old: Found, new: Found, dims: tuple[int, ...]) -> Found:
    """The new scales where they lower the squared error; not where they are NaN."""
    better = _error(goal, dtype, *_values(new), dims) < _error(goal, dtype, *_values(old), dims)
    low = old.low if new.low is None or old.low is None else old.low.where(better, new.low)
    return Found(old.scale.where(better, new.scale), low)
