"""`lower_hull` against its definition."""

from __future__ import annotations

from itertools import combinations
from random import Random

from ao_core.numerics import lower_hull


def _is_below(x: list[float], y: list[float], j: int) -> bool:
    """Whether no line between two other points passes through point j or below it."""
    for i, k in combinations(range(len(x)), 2):
        if i < j < k and y[j] >= y[i] + (y[k] - y[i]) * (x[j] - x[i]) / (x[k] - x[i]):
            return False
    return True


def test_lower_hull_is_what_no_mixture_beats() -> None:
    """Random points, few heights so that many lie on one line."""
    rng = Random(0)
    for size in (*range(6), 20):
        for _ in range(30):
            x = [float(i) for i in sorted(rng.sample(range(64), size))]
            y = [float(rng.randrange(8)) for _ in x]
            assert lower_hull(x, y) == [j for j in range(size) if _is_below(x, y, j)]


def test_points_on_a_line_are_left_out() -> None:
    assert lower_hull([0, 1, 2, 4], [4, 3, 2, 0]) == [0, 3]
    assert lower_hull([0, 1, 2], [0, 0, 5]) == [0, 1, 2]
