"""The search for scales and zero points of least measure: shrunk ranges, then fits to the codes."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from ao_core.numerics.affine import quant_max_of
from ao_core.scales.rows import Found, Rows

__all__ = ["search_range"]

Factors = tuple[float, ...]

#: what the range is multiplied by first: what is outside is clipped, and the rest has finer steps
_COARSE: Factors = (
    1.15,
    1.05,
    0.96,
    0.88,
    0.81,
    0.74,
    0.67,
    0.6,
    0.53,
    0.46,
    0.38,
    0.3,
    0.2,
    0.12,
    0.06,
)
#: the same for scales of either sign, after ranges whose end is a value of the format
_CLIPPED: Factors = (0.93, 0.86, 0.77, 0.64, 0.42)
#: for scales that are powers of two
_POWERS: Factors = (4.0, 2.0, 0.5, 0.25, 0.125, 0.0625)
#: for each of two ends
_ENDS = (
    *((f, f) for f in (1.04, 0.96, 0.92, 0.86, 0.8, 0.72, 0.62, 0.5, 0.35)),
    *((1.0, 0.85), (0.85, 1.0), (1.0, 0.6), (0.6, 1.0), (0.3, 0.8), (0.8, 0.3)),
)
#: what the best range is multiplied by then; negative: with the other sign of the scale
_FINE: Factors = (
    *(0.9, 0.93, 0.955, 0.97, 0.98, 0.987, 0.994, 1.006, 1.013, 1.02, 1.03, 1.045, 1.07),
    *(-1.0, -1.03, -0.97),
)
_FINE_ENDS = tuple(product((0.92, 0.97, 1.01, 1.05), repeat=2))
#: so many times the scale is fitted, or both scale and zero point
_FITS, _FITS_OF_BOTH = 2, 3


def search_range(rows: Rows) -> Found:
    """The best scales and zero points found, by sums in float32; in squares no worse than the start."""
    if rows.start.zero_point is not None:
        found = _try_ends(rows, _try_ends(rows, rows.first, _ENDS), _FINE_ENDS)
        return _fit(rows, found, _FITS_OF_BOTH)
    if rows.spec.chosen_scale_dtype == "e8m0":
        return _try_factors(rows, rows.first, _POWERS)
    if not rows.turns:
        found = _try_factors(rows, rows.first, _COARSE)
        return _fit(rows, _try_factors(rows, found, tuple(map(abs, _FINE[:-3]))), _FITS)
    reach = quant_max_of(rows.dtype, rows.spec.block)
    up, down = reach / rows.dtype.max, -reach / rows.dtype.min
    ranges = (up, (up * down) ** 0.5, down, *(down * factor for factor in _CLIPPED))
    found = _try_factors(rows, rows.first, (*ranges, *(-factor for factor in ranges)))
    return _fit(rows, _try_factors(rows, found, _FINE), _FITS)


def _try_factors(rows: Rows, found: Found, factors: Factors) -> Found:
    by = _row(factors, rows.x.device)
    return found.or_better(rows.best(rows.scaled(found.q, by, by)))


def _try_ends(rows: Rows, found: Found, factors: tuple[Factors, ...]) -> Found:
    low, high = (_row(ends, rows.x.device) for ends in zip(*factors, strict=True))
    return found.or_better(rows.best(rows.scaled(found.q, low, high)))


def _fit(rows: Rows, found: Found, times: int) -> Found:
    current = found
    for _ in range(times):
        current = rows.best(rows.fitted(current))
        found = found.or_better(current)
    return found


@lru_cache(maxsize=64)
def _row(values: Factors, device: torch.device) -> Tensor:
    return torch.tensor([values], dtype=torch.float32, device=device)
