"""Which cases of a large grid of tests run in every change: diagonals of it, in which each value occurs.

A grid is a test with several parameters: recipes × layers × dtypes. A mistake that needs one recipe, or
one layer, is found by a third of the grid; all of it runs before a release, by `--whole-grids`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

__all__ = ["diagonals", "pytest_addoption", "pytest_collection_modifyitems"]

#: one diagonal of this many is taken
STEP = 3
#: grids of no more cases stay whole
SMALL = 12


def diagonals(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of cases in which every value of every axis occurs, about a third where axes are that long.

    Args:
        cases: the values on each axis, in as many axes for each case.

    Returns:
        Indices in ascending order. All, where fewer than two axes have different values.
    """
    columns = list(zip(*cases, strict=True))
    axes = [column for column in columns if len(set(column)) > 1]
    if len(axes) < 2:
        return list(range(len(cases)))
    places = [{value: place for place, value in enumerate(dict.fromkeys(axis))} for axis in axes]
    rows = [
        tuple(place[value] for place, value in zip(places, row, strict=True))
        for row in zip(*axes, strict=True)
    ]
    step = min(STEP, *map(len, places))
    taken = [index for index, row in enumerate(rows) if sum(row) % step == 0]
    seen = {pair for index in taken for pair in enumerate(rows[index])}
    # a grid with holes may miss a value on its diagonals
    for index, row in enumerate(rows):
        if not seen.issuperset(enumerate(row)):
            taken.append(index)
            seen.update(enumerate(row))
    return sorted(set(taken))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that asks for all."""
    text = "run every case of large grids of tests, not every third diagonal"
    parser.addoption("--whole-grids", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is on no diagonal; who names tests gets all of them."""
    named = config.option.keyword or any("::" in argument for argument in config.args)
    if named or config.option.whole_grids:
        return
    grids: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            grids.setdefault((item.parent, item.originalname), []).append(item)
    left = set()
    for grid in grids.values():
        if len(grid) > SMALL:
            # pytest has the names of the values on each axis nowhere else
            names = [item.callspec._idlist for item in grid]  # type: ignore[attr-defined]
            if len({len(each) for each in names}) == 1:
                left.update(set(grid) - {grid[index] for index in diagonals(names)})
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
