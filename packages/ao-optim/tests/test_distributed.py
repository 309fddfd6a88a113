"""Sharded parameters, in gloo processes: steps, and checkpoints that other numbers of ranks load."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.slow
def test_shards_and_checkpoints(tmp_path: Path) -> None:
    assert "optimizers: ok" in run_ranks(WORKER, 4, tmp_path)
