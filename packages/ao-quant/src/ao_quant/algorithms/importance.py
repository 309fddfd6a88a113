"""Scales of least weighted squared error: an importance matrix for any format with scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ao_core import DType, QTensor, Spec
from ao_core.ext import quantize_values, registry
from ao_core.ext.numerics import QParams, Rows, improve_qparams, merge_qparams
from ao_core.ext.quantizing import grid_of, regridded

__all__ = ["SCALED", "weighted_nested", "weighted_qparams"]

#: kinds of number formats whose values a scale multiplies
SCALED = ("int", "float", "lut")
#: the range of a block is shrunk or widened by these factors
_FACTORS = tuple(1.1 - 0.03 * k for k in range(24))
#: the same for scales that are powers of two
_POWERS = (2.0, 0.5)
#: then, where there are zero points, each of its ends is moved by these
_MOVES = (0.7, 0.85, 1.15, 0.93, 1.07)
#: then scale and zero point are fitted to the codes, so many times
_FITS = 2


def weighted_nested(x: Tensor, importance: Tensor, spec: Spec) -> QTensor:
    """`x` in a format whose scales are quantized too, of least Σ importance · error² of each block.

    The scale of scales is that of the greatest elements. Each block has the scale, of those that it makes,
    of the least error.

    Args:
        x: (..., K).
        importance: of each element, not negative, in the shape of x.
        spec: the format, without a zero point.
    """
    nearest = quantize_values(x, spec)
    part = nearest.parts["scale"]
    assert isinstance(part, QTensor)
    numbers, dtype = grid_of(part), registry.dtypes.get(spec.dtype)
    assert numbers.scale is not None
    steps = numbers.scale.tolist()  # one, or one for each expert
    blocked = registry.layouts.get(spec.layout).blocked_shape(tuple(x.shape))
    values, by = (each.reshape(len(steps), *blocked[len(steps) > 1 :]) for each in (x, importance))
    scales = [
        weighted_qparams(
            each, counts, dtype, spec, stored=partial(_multiples, numbers.dtype, step)
        )[0]
        for each, counts, step in zip(values, by, steps, strict=True)
    ]
    chosen = torch.stack(scales).reshape(part.shape)
    new = regridded(part, numbers.nearest(chosen, numbers.block_of)[0])
    found = nearest.like({**nearest.parts, "scale": new})
    grid = grid_of(found)
    return regridded(found, grid.nearest(x.reshape(grid.block_of.shape), grid.block_of)[0])


def _multiples(dtype: DType, step: float, scale: Tensor) -> Tensor:
    """The nearest positive values of a format times `step`."""
    least = float(dtype.decode(torch.tensor([1], dtype=torch.uint8)))
    return dtype.decode(dtype.encode((scale / step).clamp(min=least))) * step


def weighted_qparams(
    x: Tensor,
    importance: Tensor,
    dtype: DType,
    spec: Spec,
    *,
    stored: Callable[[Tensor], Tensor] = lambda scale: scale,
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the least Σ importance · error² of each block.

    The best of some shrunk ranges, each end of which is moved then, and of least-squares fits to the codes
    that it gives. The range of all, which `choose_qparams` covers, is among them: no block gets worse.

    Args:
        x: of the layout's blocked shape.
        importance: of each element, not negative, in the shape of x.
        dtype: the number format, of a kind in `SCALED`.
        spec: block, storage of scales, kind of zero points and options are used.
        stored: scales -> what they will be once they are quantized too.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, partial(_improved, stored), importance.float())


def _improved(stored: Callable[[Tensor], Tensor], rows: Rows, start: QParams) -> QParams:
    low, high = rows.range()
    best = QParams(stored(start.scale), start.zero_point)
    least = _error(rows, best)

    ends = [torch.ones_like(low), torch.ones_like(low)]

    def offer(new: QParams) -> Tensor:
        nonlocal best, least
        new = QParams(stored(new.scale), new.zero_point)
        error = _error(rows, new)
        better = error < least
        best, least = merge_qparams(better, new, best), torch.where(better, error, least)
        return better

    def move(factors: list[Tensor]) -> None:
        nonlocal ends
        better = offer(rows.of_range(low * factors[0], high * factors[1]))
        ends = [torch.where(better, new, old) for new, old in zip(factors, ends, strict=True)]

    for factor in _POWERS if rows.spec.chosen_scale_dtype == "e8m0" else _FACTORS:
        move([torch.full_like(low, factor)] * 2)
    if start.zero_point is not None:
        for side, by in product((0, 1), _MOVES):
            move([end * by if number == side else end for number, end in enumerate(ends)])
    for _ in range(_FITS):
        offer(_fitted(rows, best))
    return best


def _error(rows: Rows, q: QParams) -> Tensor:
    """Σ importance · error² of each row, (B, 1)."""
    return sum(
        rows.residual(x, q).square_().mul_(by).sum(1, keepdim=True)
        for x, by in zip(rows.strips(), rows.importances(), strict=True)
    )  # type: ignore[return-value]


def _fitted(rows: Rows, q: QParams) -> QParams:
    """Scales and zero points of least weighted error for the codes that `q` gives, as stored."""
    sums = [torch.zeros_like(q.scale, dtype=torch.float64) for _ in range(5)]
    for x, by in zip(rows.strips(), rows.importances(), strict=True):
        values = rows.codes(x, q)
        weighted = values * by
        for total, part in zip(
            sums, (weighted * values, weighted * x, weighted, by * x, by), strict=True
        ):
            total += part.sum(1, keepdim=True)
    squares, products, values_, goals, count = sums
    if q.zero_point is None:
        return QParams(rows.stored(_positive(products / squares, q.scale), None).scale, None)
    slope = (products - values_ * goals / count) / (squares - values_ * values_ / count)
    slope = _positive(slope, q.scale)
    point = rows.stored(q.scale, (values_ / count - goals / count / slope).float()).zero_point
    assert point is not None
    # the slope again, for the zero point as it is stored
    slope = (products - point * goals) / (squares + point * (point * count - 2 * values_))
    return rows.stored(_positive(slope, q.scale), point)


def _positive(scale: Tensor, otherwise: Tensor) -> Tensor:
    """Float32, where it is finite and positive; else `otherwise`."""
    scale = scale.float()
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, otherwise)
