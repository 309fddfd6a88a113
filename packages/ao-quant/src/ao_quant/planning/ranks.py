"""Whether two orders agree."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["rank_correlation"]


def rank_correlation(points: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's, of pairs; None for fewer than three."""
    if len(points) < 3:
        return None
    first, second = ([_rank(column, x) for x in column] for column in zip(*points, strict=True))
    mean = (len(points) - 1) / 2
    products = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    squares = [sum((r - mean) ** 2 for r in ranks) for ranks in (first, second)]
    return products / (squares[0] * squares[1]) ** 0.5 if squares[0] and squares[1] else None


def _rank(column: Sequence[float], x: float) -> float:
    """How many are less, and half of how many others are equal."""
    return sum(y < x for y in column) + (sum(y == x for y in column) - 1) / 2
