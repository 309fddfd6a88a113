"""The search for scales and zero points of least measure: shrunk ranges, then fits to the codes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.numerics.affine import quant_max_of
from ao_core.numerics.slabs import searched_at_once
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.scales.exact import never_worse, surely_better
from ao_core.scales.rows import Found, QParams, Rows
from ao_core.spec import ROW, Spec

__all__ = ["SearchPlan", "improved", "search_scales"]

Factors = tuple[float, ...]
#: factors for the low end of a range, and for the high one, of as many candidates
Ends = tuple[Factors, Factors]

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
#: the bits of a float32's exponent
_EXPONENT = 0x7F800000
#: so many times the scale is fitted, or both scale and zero point
_FITS, _FITS_OF_BOTH = 2, 3


class SearchPlan(NamedTuple):
    """What is tried, and what is made small."""

    #: the ends of the best range so far are multiplied by these, stage after stage
    stages: tuple[Ends, ...]
    #: how often scales are fitted to the codes then
    fits: int
    #: how much more than others an error along the weights counts
    gain: float
    #: of the errors that the measure adds up; None: 2
    power: float | None


def improved(rows: Rows) -> QParams:
    """The best scales and zero points that a search finds; in squared errors no worse than the start."""
    plan = _plan(rows)
    if rows.nested is not None:
        return never_worse(rows, *_searched_in_units(rows, plan))
    spec = Spec(rows.dtype.name, ROW, rows.spec.chosen_scale_dtype, rows.spec.zero_point)
    shape, start = tuple(rows.x.shape), rows.start
    call = Call("search_scales", spec, shape, shape, rows.x.dtype, rows.x.device.type)
    scale, point, better = run(
        call, rows.x, start.scale, start.zero_point, rows.importance, plan, spec
    )
    return never_worse(rows, QParams(scale, point), better)


def search_scales(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    plan: SearchPlan,
    spec: Spec,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The reference of the op: all rows at once, one stage after the other."""
    dtype, start = registry.dtypes.get(spec.dtype), QParams(scale, zero_point)
    rows = Rows(x, dtype, spec, start, importance, plan.gain, plan.power)
    found, better = _searched_in_units(rows, plan)
    return found.scale, found.zero_point, better


def _plan(rows: Rows) -> SearchPlan:
    stages: tuple[Ends, ...]
    if rows.start.zero_point is not None:
        stages, fits = (_ends(_ENDS), _ends(_FINE_ENDS)), _FITS_OF_BOTH
    elif rows.spec.chosen_scale_dtype == "e8m0":
        stages, fits = (_both(_POWERS),), 0
    elif not rows.turns:
        stages, fits = (_both(_COARSE), _both(tuple(map(abs, _FINE[:-3])))), _FITS
    else:
        reach = quant_max_of(rows.dtype, rows.spec.block)
        up, down = reach / rows.dtype.max, -reach / rows.dtype.min
        ranges = (up, (up * down) ** 0.5, down, *(down * factor for factor in _CLIPPED))
        stages = (_both((*ranges, *(-factor for factor in ranges))), _both(_FINE))
        fits = _FITS
    return SearchPlan(stages, fits, rows.gain, rows.power)


def _both(factors: Factors) -> Ends:
    return factors, factors


def _ends(factors: tuple[Factors, ...]) -> Ends:
    low, high = zip(*factors, strict=True)
    return low, high


def _searched_in_units(rows: Rows, plan: SearchPlan) -> tuple[QParams, Tensor]:
    """As `_searched`; with a power, x and scales are divided by powers of two near the scales.

    So powers of errors are far from where float32 ends. Not for a block of more than a piece, whose copy
    would be large.
    """
    if plan.power is None or rows.x.numel() > 2 * searched_at_once(rows.x.device):
        return _searched(rows, plan)
    scale, point = rows.start.scale, rows.start.zero_point
    unit = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    unit = unit.clamp(2.0**-126, 2.0**126)
    x = rows.x.to(torch.float32) / unit
    found, better = _searched(
        replace(rows, x=x, start=QParams(scale / unit, point), unit=unit), plan
    )
    return QParams(found.scale * unit, found.zero_point), better


def _searched(rows: Rows, plan: SearchPlan) -> tuple[QParams, Tensor]:
    """The best candidates, and where they are better than the start without doubt."""
    found = rows.first
    for ends in plan.stages:
        low, high = (_row(factors, rows.x.device) for factors in ends)
        found = found.or_better(rows.best(rows.scaled(found.q, low, high)))
    q = _fit(rows, found, plan.fits).q
    return q, surely_better(rows, q)


def _fit(rows: Rows, found: Found, times: int) -> Found:
    current = found
    for _ in range(times):
        current = rows.best(rows.fitted(current))
        found = found.or_better(current)
    return found


@lru_cache(maxsize=64)
def _row(values: Factors, device: torch.device) -> Tensor:
    return torch.tensor([values], dtype=torch.float32, device=device)
