"""Rounding of integers that is learned: offsets of each weight and factors of each block's range.

SignRound (Cheng et al. 2023, arXiv:2309.05516). A code is k = clamp(round(w / s + z + v)), with an offset v
from -1/2 to 1/2 of each weight; the range of a block, from l to u, becomes β₁ l to β₂ u, from which its scale
s and zero point z follow. Gradients go through the rounding as if it were not there ("straight through").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ao_core import DType, QTensor
from ao_core.ext.numerics import (
    block_sum,
    grid_shape,
    scale_to_float,
    split_blocks,
    store_qparams,
    zero_to_float,
)
from ao_core.ext.quantizing import grid_of, regridded

__all__ = ["Problem", "Rounded", "Rounding", "learned", "problem_of", "rounded", "signs", "stepped"]

#: offsets of more would not be rounding up or down
_HALF = 0.5
#: factors of ranges are 1 plus or minus this, at most
_MOST = 0.5


@dataclass(frozen=True)
class Problem:
    """A weight that is to be rounded, and the grid to begin with."""

    #: of the shape in which codes are stored, float32 or float64
    weight: Tensor
    dtype: DType
    #: extents of a block along the last dimensions
    block: tuple[int, ...]
    #: one per block, in the dtype of the weight
    scale: Tensor
    #: one per block, in the domain of codes; None: all are 0
    zero_point: Tensor | None
    #: as in `Spec`
    zero_kind: str
    #: in which new scales are stored; None: scales and zero points stay
    scale_dtype: str | None


@dataclass(frozen=True)
class Rounding:
    """What is learned."""

    #: v, of the shape of the weight, from -1/2 to 1/2
    offsets: Tensor
    #: β₁ and β₂ of each block; the same ones where there are no zero points
    low: Tensor
    high: Tensor

    @classmethod
    def nearest(cls, problem: Problem) -> Rounding:
        """That to nearest on the grid as it is."""
        ones = torch.ones_like(problem.scale)
        return cls(torch.zeros_like(problem.weight), ones, ones)


@dataclass(frozen=True)
class Rounded:
    """A weight by some rounding."""

    #: decoded, of the shape of the weight
    values: Tensor
    #: whole numbers, of the shape of the weight; which of them were not clamped
    codes: Tensor
    inside: Tensor
    #: of each block as they are used, the zero point in the domain of codes
    scale: Tensor
    zero_point: Tensor
    #: as they are stored; None: they are those of the start
    stored: tuple[Tensor, Tensor | None] | None


def problem_of(weight: Tensor, q: QTensor, ranges: bool) -> Problem:
    """The problem for a weight whose start is `q`.

    Args:
        weight: of any shape with the elements of `q` in its stored order.
        q: the weight by some scales.
        ranges: whether ranges are learned, too. Scales that are quantized themselves, or powers of two, stay
            all the same.
    """
    grid, name = grid_of(q), q.spec.scale_dtype
    assert grid.scale is not None  # integers have one
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    count = grid_shape(grid.shape, grid.block)
    scale, zero = grid.scale.reshape(count).to(wide), None
    if grid.zero_point is not None:
        zero = zero_to_float(grid.zero_point.reshape(count), grid.dtype).to(wide)
        zero = zero / _divisor(scale) if grid.is_offset else zero
    return Problem(
        weight.to(wide).reshape(grid.shape),
        grid.dtype,
        grid.block,
        scale,
        zero,
        q.spec.zero_point,
        name if ranges and isinstance(name, str) and name != "e8m0" else None,
    )


def rounded(problem: Problem, by: Rounding) -> Rounded:
    """The weight by a rounding."""
    scale, zero, stored = _grid(problem, by)
    ratio = problem.weight.clone()
    view, by_block = split_blocks(ratio, problem.block, _divisor(scale))
    view.div_(by_block)
    view, by_block = split_blocks(ratio, problem.block, zero)
    view.add_(by_block)
    codes = ratio.add_(by.offsets).round()
    inside = (codes >= problem.dtype.min) & (codes <= problem.dtype.max)
    codes.clamp_(problem.dtype.min, problem.dtype.max)
    values = codes.clone()
    view, by_block = split_blocks(values, problem.block, zero)
    view.sub_(by_block)
    view, by_block = split_blocks(values, problem.block, scale)
    view.mul_(by_block)
    return Rounded(values, codes, inside, scale, zero, stored)


def signs(problem: Problem, now: Rounded, gradient: Tensor) -> Rounding:
    """The signs of the gradients of a loss, of which that of the values is given.

    With l and u the ends of the range, n steps between them, and k the code counted from the least one, a
    value is l + s k, s = (u - l) / n, and k follows w and s unless it is clamped.

    Args:
        problem: the weight.
        now: by its rounding as it is.
        gradient: of the loss by the values, of the shape of the weight.
    """
    least, steps = problem.dtype.min, problem.dtype.max - problem.dtype.min
    through = gradient * now.inside
    start_zero = 0.0 if problem.zero_point is None else problem.zero_point
    # d value / d s: k where clamped, else k - (w - l) / s
    of_scale = now.codes - least
    follows = problem.weight.clone()
    view, by_block = split_blocks(follows, problem.block, _divisor(now.scale))
    view.div_(by_block)
    view, by_block = split_blocks(follows, problem.block, now.zero_point - least)
    view.add_(by_block)
    of_scale.sub_(follows.mul_(now.inside)).mul_(gradient)
    by_scale = block_sum(of_scale, problem.block)
    clamped = block_sum(gradient - through, problem.block)
    low = (least - start_zero) * (clamped - by_scale / steps)
    high = (problem.dtype.max - start_zero) * by_scale / steps
    if problem.zero_point is None:  # one factor for both, and a negative scale turns all directions
        turn = torch.ones_like(now.scale).copysign(now.scale)
        view, by_block = split_blocks(through, problem.block, turn)
        view.mul_(by_block)
        low = high = (low + high) * turn
    return Rounding(through.sign_(), low.sign(), high.sign())


def stepped(by: Rounding, to: Rounding, rate: float) -> Rounding:
    """A rounding one step against the signs of a gradient."""
    return Rounding(
        by.offsets.sub(to.offsets, alpha=rate).clamp_(-_HALF, _HALF),
        by.low.sub(to.low, alpha=rate).clamp_(1 - _MOST, 1 + _MOST),
        by.high.sub(to.high, alpha=rate).clamp_(1 - _MOST, 1 + _MOST),
    )


def learned(q: QTensor, found: Rounded) -> QTensor:
    """The start of a problem with the codes, scales and zero points of a rounding."""
    codes = q.format.encode(found.codes.float()).reshape(q.stored_shape)
    return regridded(q, codes, *(found.stored or (None, None)))


def _grid(
    problem: Problem, by: Rounding
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None] | None]:
    """Scale and zero point of each block as they are used, and as they are stored."""
    least, most = problem.dtype.min, problem.dtype.max
    is_fixed, point = problem.zero_point is None, problem.zero_point
    if point is None:
        point = torch.zeros_like(problem.scale)
    if problem.scale_dtype is None:
        return problem.scale, point, None
    # the ends of the range in steps of the start: whole numbers where its zero point is
    low, high = by.low * (least - point), by.high * (most - point)
    factor = (high - low) / (most - least)
    new_point = None if is_fixed else (least - low / factor).float()
    stored = store_qparams(
        (problem.scale * factor).float(),
        new_point,
        problem.dtype,
        problem.zero_kind,
        problem.scale_dtype,
    )
    scale = scale_to_float(stored[0]).to(problem.weight.dtype)
    if stored[1] is not None:
        point = zero_to_float(stored[1], problem.dtype).to(scale)
        point = point / _divisor(scale) if problem.zero_kind == "offset" else point
    return scale, point, stored


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by: what was rounded to 0 makes every weight 0."""
    return torch.where(scale == 0, torch.inf, scale)
