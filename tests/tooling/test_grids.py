"""Diagonals of grids, and what of them pytest runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grids import diagonals

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sizes", [(5, 7), (2, 9), (4, 3, 5), (1, 6, 6), (2, 2)])
def test_every_value_occurs_on_a_part_of_the_grid(sizes):
    cases = list(itertools.product(*map(range, sizes)))
    taken = [cases[index] for index in diagonals(cases)]
    for axis, size in enumerate(sizes):
        assert {case[axis] for case in taken} == set(range(size))
    long = [size for size in sizes if size > 1]
    assert len(taken) == len(cases) // min(3, *long) + bool(len(cases) % min(3, *long))


def test_one_axis_and_no_case_stay_whole():
    assert diagonals([("int4",), ("int8",)]) == [0, 1]
    assert diagonals([("int4", "eager"), ("int8", "eager")]) == [0, 1]
    assert diagonals([]) == []


def test_a_value_that_no_diagonal_meets_is_added():
    cases = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
    assert {cases[index][0] for index in diagonals(cases)} == {"a", "b", "c"}


_GRID = """
import pytest

@pytest.mark.parametrize("bits", range(4))
@pytest.mark.parametrize("group", range(6))
def test_grid(bits, group):
    pass

@pytest.mark.parametrize("bits", range(30))
def test_row(bits):
    pass

@pytest.mark.parametrize("bits", range(3))
@pytest.mark.parametrize("group", range(4))
def test_small(bits, group):
    pass
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), 8 + 30 + 12), (("--whole-grids",), 24 + 30 + 12), (("-k", "grid"), 24 + 30 + 12)],
)
def test_pytest_runs_diagonals_unless_asked_for_all(tmp_path, options, expected):
    (tmp_path / "test_grids.py").write_text(_GRID, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "grids", "--collect-only", "-q", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.count("::") == expected, done.stdout + done.stderr
    assert ("deselected" in done.stdout) == (not options)
