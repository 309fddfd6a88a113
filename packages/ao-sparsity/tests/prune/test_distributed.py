"""Under FSDP2, in two gloo processes, masks are what they are in one, and so is training."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    output = run_ranks(WORKER, 2, tmp_path)
    for name in ("before", "after", "gradual", "movement"):
        assert f"{name}: ok" in output, output
