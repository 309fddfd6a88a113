"""Scales of least weighted squared error: an importance matrix for any format with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import DType, Spec
from ao_core.ext.numerics import QParams, Rows, improve_qparams, merge_qparams

__all__ = ["SCALED", "weighted_qparams"]

#: kinds of number formats whose values a scale multiplies
SCALED = ("int", "float", "lut")
#: the range of a block is shrunk or widened by these factors
_FACTORS = tuple(1.1 - 0.03 * k for k in range(24))
#: then scale and zero point are fitted to the codes, so many times
_FITS = 2


def weighted_qparams(
    x: Tensor, importance: Tensor, dtype: DType, spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the least Σ importance · error² of each block.

    The best of some shrunk ranges, and of least-squares fits to the codes that it gives. The range of all,
    which `choose_qparams` covers, is among them, so no block is worse than that.

    Args:
        x: of the layout's blocked shape.
        importance: of each element, not negative, in the shape of x.
        dtype: the number format, of a kind in `SCALED`.
        spec: block, storage of scales, kind of zero points and options are used.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, _improved, importance.float())


def _improved(rows: Rows, start: QParams) -> QParams:
    low, high = rows.range()
    best, least = start, _error(rows, start)

    def offer(new: QParams) -> None:
        nonlocal best, least
        error = _error(rows, new)
        better = error < least
        best, least = merge_qparams(better, new, best), torch.where(better, error, least)

    for factor in _FACTORS:
        offer(rows.of_range(low * factor, high * factor))
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
        for total, part in zip(sums, (weighted * values, weighted * x, weighted, by * x, by), strict=True):
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
