"""Telemetry sees sharded layers as it sees whole ones, and layers fall back while they are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.slow
def test_records_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    output = run_ranks(WORKER, 2, tmp_path)
    assert "gathered in float8: False, 36 records" in output, output
    assert "gathered in float8: True, 32 records" in output, output
