"""Choosing one option a row: the least sum of values within a limit on the sum of weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum
from typing import Any

from ao_core.errors import MissingExtraError

__all__ = ["frontier", "solve"]

#: solutions that exceed the limit by the solver's tolerance, before the limit is lowered for good
_ATTEMPTS = 20


def solve(
    values: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], limit: float
) -> list[int] | None:
    """The option of each row for the least total value within `limit`, or None where none is.

    The multiple-choice knapsack problem, solved to optimality by HiGHS through scipy's `milp`; where
    the best options fit together, without it. Deterministic.

    Args:
        values: not negative, of each option of each row.
        weights: likewise.
        limit: on the sum of the weights of the options chosen.

    Raises:
        MissingExtraError: scipy is needed and not installed (extra "plan").
    """
    rows = [_undominated(v, w) for v, w in zip(values, weights, strict=True)]
    lightest = [options[0] for options in rows]
    floor = _total(weights, lightest)
    if floor > limit:
        return None
    best = [options[-1] for options in rows]
    if _total(weights, best) <= limit:
        return best
    if floor == limit:
        return lightest
    scale = _lower_bound(values, weights, limit) or max(map(max, values))
    room = limit - floor
    for _ in range(_ATTEMPTS):
        picks = _milp(rows, values, weights, scale, room)
        excess = _total(weights, picks) - limit
        if excess <= 0:
            return picks
        room -= min(max(2 * excess, 1e-9 * room), room / 2)
    return lightest


def frontier(
    values: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]
) -> list[tuple[float, float]]:
    """(weight, value) of the best solutions for the limits where no option need be a mixture of two.

    From the lightest of all to the best of all. Each is optimal for its weight.
    """
    hulls = [_hull(v, w) for v, w in zip(values, weights, strict=True)]
    weight = _total(weights, [hull[-1] for hull in hulls])
    value = _total(values, [hull[-1] for hull in hulls])
    points = [(weight, value)]
    # from the best on, so that small values are added to smaller ones
    for _, dw, dv in reversed(_steps(hulls, values, weights)):
        weight, value = weight - dw, value - dv
        points.append((weight, value))
    return points[::-1]


def _milp(
    rows: list[list[int]],
    values: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    scale: float,
    room: float,
) -> list[int]:
    """The picks of the solver; both sums are scaled to about 1, which its tolerances are made for."""
    optimize, sparse = _scipy()
    # an option that exceeds the room alone would only be a number that is too large for the solver
    flat = [
        (i, j)
        for i, options in enumerate(rows)
        for j in options
        if weights[i][j] - weights[i][options[0]] <= room
    ]
    objective = [values[i][j] / scale for i, j in flat]
    load = [[(weights[i][j] - weights[i][rows[i][0]]) / room for i, j in flat]]
    one = sparse.csr_array(
        ([1.0] * len(flat), ([i for i, _ in flat], range(len(flat)))), (len(rows), len(flat))
    )
    result = optimize.milp(
        objective,
        integrality=[1] * len(flat),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one, 1, 1),
            optimize.LinearConstraint(load, -1, 1),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.x is not None, result.message  # the lightest options always fit
    taken: dict[int, tuple[float, int]] = {}
    for (i, j), x in zip(flat, result.x, strict=True):
        taken[i] = max(taken.get(i, (-1.0, 0)), (float(x), j))
    return [taken[i][1] for i in range(len(rows))]


def _scipy() -> Any:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingExtraError("scipy", "ao-quant[plan]", "plan()") from error
    return optimize, sparse


def _undominated(values: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Options that are better than all lighter ones, lightest first."""
    order = sorted(range(len(values)), key=lambda j: (weights[j], values[j], j))
    kept: list[int] = []
    for j in order:
        if not kept or values[j] < values[kept[-1]]:
            kept.append(j)
    return kept


def _hull(values: Sequence[float], weights: Sequence[float]) -> list[int]:
    """The options on the lower convex hull, lightest first."""
    hull: list[int] = []
    for j in _undominated(values, weights):
        while len(hull) > 1 and _slope(hull[-1], j, values, weights) <= _slope(
            hull[-2], hull[-1], values, weights
        ):
            hull.pop()
        hull.append(j)
    return hull


def _slope(a: int, b: int, values: Sequence[float], weights: Sequence[float]) -> float:
    return (values[b] - values[a]) / (weights[b] - weights[a])


def _steps(
    hulls: list[list[int]], values: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]
) -> list[tuple[float, float, float]]:
    """(slope, more weight, less value) of the steps from option to option, the most worth first."""
    return sorted(
        (_slope(a, b, v, w), w[b] - w[a], v[b] - v[a])
        for hull, v, w in zip(hulls, values, weights, strict=True)
        for a, b in pairwise(hull)
    )


def _lower_bound(
    values: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], limit: float
) -> float:
    """The least total value if options could be mixed."""
    hulls = [_hull(v, w) for v, w in zip(values, weights, strict=True)]
    room = limit - fsum(w[hull[0]] for hull, w in zip(hulls, weights, strict=True))
    total = fsum(v[hull[0]] for hull, v in zip(hulls, values, strict=True))
    for _, dw, dv in _steps(hulls, values, weights):
        part = min(1.0, room / dw)
        total, room = total + part * dv, room - part * dw
        if part < 1.0:
            break
    return max(total, 0.0)


def _total(rows: Sequence[Sequence[float]], picks: list[int]) -> float:
    chosen = [row[pick] for row, pick in zip(rows, picks, strict=True)]
    return sum(chosen) if all(isinstance(x, int) for x in chosen) else fsum(chosen)
