"""Scales and zero points of least squared error, by a search over shrunk ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.numerics.scales.rows import QParams, Rows, improve_qparams, merge
from ao_core.records import DType
from ao_core.spec import Spec

__all__ = ["mse_qparams", "search_range"]

#: the range is widened or shrunk by these factors, down to a sixty-fourth …
_FACTORS = tuple(2.0 ** (-k / 4) for k in range(-1, 25))
#: … until so many in a row have improved no block
_PATIENCE = 6
#: then each end is moved by itself around the best factor, by so much at most, in so many steps
_REFINEMENTS = ((0.12, 8), (0.03, 8))
#: and the scale and zero point are fitted to the codes, so many times
_FITS = 3


def mse_qparams(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points near the least squared error of each block; no block is worse than absmax.

    The range of a block, which `choose_qparams` covers whole, is shrunk: what lies outside is
    clipped, and the rest has finer steps. A search over factors for the whole range, then for each of
    its ends (for integers in two's complement with each sign of the scale), is followed by
    least-squares fits of scale and zero point to the codes. Squared errors
    are those of `Rows.errors`, in which what all blocks have in common counts more: a change of the
    length of the weights. Errors are those of the float32 values that the stored scales and zero
    points give.

    Args:
        x: of the layout's blocked shape.
        dtype: the number format, of any kind.
        spec: block, storage of scales, kind of zero points and options are used.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, _improve)


def _improve(rows: Rows, start: QParams) -> QParams:
    return rows.never_worse(search_range(rows, start), start)


def search_range(rows: Rows, start: QParams) -> QParams:
    """The best scales and zero points found; the sums that compare them are in float32."""
    first, *others = (_search(rows, start, sign) for sign in rows.signs)
    best, error = first
    for other, its_error in others:
        best, error = merge(its_error < error, other, best), torch.minimum(error, its_error)
    return best


def _search(rows: Rows, start: QParams, sign: float) -> tuple[QParams, Tensor]:
    """What is found with scales of one sign, and its errors."""
    low, high = rows.range()
    best = start
    limit, error = rows.errors(start)
    ends = [torch.ones_like(low), torch.ones_like(low)]

    def keep_better(new: QParams) -> Tensor:
        nonlocal best, error
        squared, new_error = rows.errors(new)
        better = (new_error < error) & (squared <= limit)
        best, error = merge(better, new, best), torch.where(better, new_error, error)
        return better

    def offer(factors: list[Tensor]) -> bool:
        nonlocal ends
        new = rows.of_range(low * factors[0], high * factors[1])
        better = keep_better(QParams(new.scale * sign, new.zero_point))
        ends = [torch.where(better, f, end) for f, end in zip(factors, ends, strict=True)]
        return bool(better.any())

    failures = 0
    for factor in _FACTORS:
        failures = 0 if offer([torch.full_like(low, factor)] * 2) else failures + 1
        if failures == _PATIENCE:
            break
    # without a zero point only the wider end counts, so both are moved at once
    sides = ((True, True),) if start.zero_point is None else ((True, False), (False, True))
    for width, steps in _REFINEMENTS:
        for side in sides:
            middle = ends
            for step in range(steps):
                by = 1.0 + width * (2 * step / (steps - 1) - 1.0)
                offer([end * by if moved else end for end, moved in zip(middle, side, strict=True)])
    current = best
    for _ in range(_FITS):
        current = rows.fitted(current, None)
        keep_better(current)
    return best, error
