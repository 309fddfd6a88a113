"""The lower convex hull of points in the plane: which options mixtures of others do not beat."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["lower_hull"]


def lower_hull(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Indices of the points on the lower convex hull, from the first to the last point.

    Andrew's monotone chain (1979, Information Processing Letters 9(5)). A point on the line between two
    others is left out.

    Args:
        x: strictly increasing.
        y: as many.
    """

    def slope(i: int, j: int) -> float:
        return (y[j] - y[i]) / (x[j] - x[i])

    kept: list[int] = []
    for j in range(len(x)):
        while len(kept) > 1 and slope(kept[-1], j) <= slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(j)
    return kept
