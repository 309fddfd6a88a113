"""Choosing one option a row: the least sum of values within a limit on the sum of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import fsum
from typing import Any, NamedTuple

from ao_core.ext import MissingExtraError
from ao_core.ext.numerics import lower_hull

__all__ = ["frontier", "solve"]

#: solutions that exceed the limit by the solver's tolerance, before the limit is lowered for good
_ATTEMPTS = 20


def solve(
    values: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    limit: float,
    needs: Sequence[Sequence[frozenset[str]]] | None = None,
    charges: Mapping[str, float] | None = None,
) -> list[int] | None:
    """The option of each row for the least total value within `limit`, or None where none is.

    The multiple-choice knapsack problem, with charges for what options need, solved to optimality by
    HiGHS through scipy's `milp`; where the best options fit together, without it. Deterministic.

    Args:
        values: not negative, of each option of each row.
        weights: likewise.
        limit: on the sum of the weights of the options chosen, and the charges of what they need.
        needs: of each option, names in `charges`; by default nothing.
        charges: a weight for each name, counted once however many options need it.

    Raises:
        MissingExtraError: scipy is needed and not installed (extra "plan").
    """
    needs = needs or [[frozenset()] * len(row) for row in values]
    charges = charges or {}

    def total(picks: list[int]) -> float:
        used = frozenset().union(*(row[pick] for row, pick in zip(needs, picks, strict=True)))
        return _total([*weights, [sum(charges[name] for name in sorted(used))]], [*picks, 0])

    best = [min(range(len(v)), key=lambda j: (v[j], w[j], j)) for v, w in _pairs(values, weights)]
    if total(best) <= limit:
        return best
    lightest = [
        min(range(len(w)), key=lambda j: (w[j], v[j], j)) for v, w in _pairs(values, weights)
    ]
    room = limit - _total(weights, lightest)
    if room <= 0:
        return lightest if room == 0 and total(lightest) <= limit else None
    problem = _Problem(values, weights, needs, charges, lightest)
    for _ in range(_ATTEMPTS):
        picks = _milp(problem, _lower_bound(values, weights, limit) or max(map(max, values)), room)
        if picks is None:
            return lightest if total(lightest) <= limit else None
        excess = total(picks) - limit
        if excess <= 0:
            return picks
        room -= min(max(2 * excess, 1e-9 * room), room / 2)
    return lightest if total(lightest) <= limit else None


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


class _Problem(NamedTuple):
    values: Sequence[Sequence[float]]
    weights: Sequence[Sequence[float]]
    needs: Sequence[Sequence[frozenset[str]]]
    charges: Mapping[str, float]
    #: the lightest option of each row
    lightest: list[int]


def _milp(problem: _Problem, scale: float, room: float) -> list[int] | None:
    """The picks of the solver; both sums are scaled to about 1, which its tolerances are made for.

    Variables are the options, 1 for one of each row, and what they need, 1 where one does.
    """
    optimize, sparse = _scipy()
    values, weights, needs, charges, lightest = problem
    # an option that exceeds the room alone would only be a number that is too large for the solver
    flat = [
        (i, j)
        for i, row in enumerate(weights)
        for j in _undominated(values[i], row, needs[i])
        if row[j] - row[lightest[i]] <= room
    ]
    names = [name for name, charge in sorted(charges.items()) if charge <= room]
    flat = [(i, j) for i, j in flat if needs[i][j] <= set(names)]
    columns = {name: len(flat) + k for k, name in enumerate(names)}
    count = len(flat) + len(names)
    load = [(weights[i][j] - weights[i][lightest[i]]) / room for i, j in flat]
    one = sparse.csr_array(
        ([1.0] * len(flat), ([i for i, _ in flat], range(len(flat)))), (len(values), count)
    )
    constraints = [
        optimize.LinearConstraint(one, 1, 1),
        optimize.LinearConstraint([[*load, *(charges[name] / room for name in names)]], -1, 1),
    ]
    # the options of a row that need a name, less the name: at most 0
    pairs = sorted({(i, name) for i, j in flat for name in needs[i][j]})
    at = {pair: row for row, pair in enumerate(pairs)}
    entries = [(at[i, n], k, 1.0) for k, (i, j) in enumerate(flat) for n in sorted(needs[i][j])]
    entries += [(row, columns[name], -1.0) for (_, name), row in at.items()]
    if entries:
        rows, cols, factors = zip(*entries, strict=True)
        implied = sparse.csr_array((factors, (rows, cols)), (len(pairs), count))
        constraints.append(optimize.LinearConstraint(implied, -1, 0))
    result = optimize.milp(
        [*(values[i][j] / scale for i, j in flat), *([0.0] * len(names))],
        integrality=[1] * count,
        bounds=optimize.Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    taken: dict[int, tuple[float, int]] = {}
    for (i, j), x in zip(flat, result.x, strict=False):
        taken[i] = max(taken.get(i, (-1.0, 0)), (float(x), j))
    return [taken[i][1] for i in range(len(values))]


def _pairs(
    values: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    return list(zip(values, weights, strict=True))


def _scipy() -> Any:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingExtraError("scipy", "ao-quant[plan]", "plan()") from error
    return optimize, sparse


def _undominated(
    values: Sequence[float],
    weights: Sequence[float],
    needs: Sequence[frozenset[str]] | None = None,
) -> list[int]:
    """Options that are better than all lighter ones that need no more, lightest first."""
    order = sorted(range(len(values)), key=lambda j: (weights[j], values[j], j))
    kept: list[int] = []
    for j in order:
        if not any(
            values[k] <= values[j] and (needs is None or needs[k] <= needs[j]) for k in kept
        ):
            kept.append(j)
    return kept


def _hull(values: Sequence[float], weights: Sequence[float]) -> list[int]:
    """The options on the lower convex hull, lightest first."""
    options = _undominated(values, weights)
    points = [weights[j] for j in options], [values[j] for j in options]
    return [options[j] for j in lower_hull(*points)]


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
