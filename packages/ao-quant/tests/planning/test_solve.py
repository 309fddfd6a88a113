"""The choice of one option a row is the best there is, whatever solver finds it."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from ao_core.ext import MissingExtraError
from ao_quant.planning.solve import frontier, solve


def total(rows, picks):
    return sum(row[pick] for row, pick in zip(rows, picks, strict=True))


def brute_force(values, weights, limit):
    """The least value within the limit, of all combinations."""
    combinations = itertools.product(*(range(len(row)) for row in values))
    fitting = [picks for picks in combinations if total(weights, picks) <= limit]
    return min((total(values, picks) for picks in fitting), default=None)


def problem(seed):
    rng = random.Random(seed)
    rows, options = rng.randint(1, 6), rng.randint(1, 5)
    weights = [[rng.randint(100, 10**9) for _ in range(options)] for _ in range(rows)]
    values = [[10 ** rng.uniform(-9, 1) for _ in range(options)] for _ in range(rows)]
    return values, weights, rng


@pytest.mark.parametrize("seed", range(40))
def test_as_good_as_trying_everything(seed):
    values, weights, rng = problem(seed)
    limit = rng.randint(sum(map(min, weights)), sum(map(max, weights)))
    picks = solve(values, weights, limit)
    assert total(weights, picks) <= limit
    assert total(values, picks) == pytest.approx(brute_force(values, weights, limit), rel=1e-6)
    assert solve(values, weights, limit) == picks


@pytest.mark.parametrize("seed", range(20))
def test_what_several_need_is_charged_once(seed):
    values, weights, rng = problem(seed)
    charges = {name: rng.randint(1, 10**9) for name in "abc"}
    needs = [[frozenset(rng.sample("abc", rng.randint(0, 2))) for _ in row] for row in values]

    def charged(picks):
        names = set().union(*(row[pick] for row, pick in zip(needs, picks, strict=True)))
        return total(weights, picks) + sum(charges[name] for name in names)

    limit = rng.randint(sum(map(min, weights)), sum(map(max, weights)) + sum(charges.values()))
    combinations = itertools.product(*(range(len(row)) for row in values))
    best = min((total(values, p) for p in combinations if charged(p) <= limit), default=None)
    picks = solve(values, weights, limit, needs, charges)
    if best is None:
        assert picks is None
    else:
        assert charged(picks) <= limit
        assert total(values, picks) == pytest.approx(best, rel=1e-6)


def test_exact_at_the_limit():
    """A byte less, and another choice is the best."""
    for seed in range(10):
        values, weights, rng = problem(seed)
        picks = [rng.randrange(len(row)) for row in values]
        limit = total(weights, picks)
        found = solve(values, weights, limit)
        assert total(values, found) <= total(values, picks)
        best = total(weights, found)
        below = solve(values, weights, best - 1)
        assert below is None or total(weights, below) < best
        assert below is None or total(values, below) >= total(values, found)


def test_nothing_fits():
    assert solve([[1.0, 0.0]], [[5, 9]], 4) is None
    assert solve([[1.0, 0.0]], [[5, 9]], 5) == [0]
    assert solve([], [], 0) == []


def test_the_frontier_is_optimal_and_convex():
    for seed in range(10):
        values, weights, _ = problem(seed)
        points = frontier(values, weights)
        assert points[0][0] == sum(map(min, weights))
        assert points[-1][1] == pytest.approx(sum(map(min, values)), rel=1e-9)
        for weight, value in points:
            assert value == pytest.approx(
                brute_force(values, weights, weight * (1 + 1e-12)), rel=1e-6
            )
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
        assert all(a <= b * (1 - 1e-9) or a <= b for a, b in itertools.pairwise(slopes))
        assert all(slope < 0 for slope in slopes)


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    values, weights = [[2.0, 1.0], [2.0, 1.0]], [[1, 3], [1, 3]]
    assert solve(values, weights, 6) == [1, 1]  # everything fits: no solver is needed
    with pytest.raises(MissingExtraError, match=r'pip install "ao-quant\[plan\]"'):
        solve(values, weights, 5)
