"""Sharded by FSDP2, in gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    assert "shards: ok" in run_ranks(WORKER, 2, tmp_path)
