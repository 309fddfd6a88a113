"""A conversion holds one weight at a time."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/bench_convert.py"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_folder(tmp_path) -> None:
    measure = runpy.run_path(str(BENCHMARK))["measure"]
    rows = measure(tmp_path, 40, (1024, 4096), embedding=False)
    assert rows[0]["folder MB"] > 160
    for row in rows:
        assert row["bytes equal"]
        assert row["verdict"] == "met", row
