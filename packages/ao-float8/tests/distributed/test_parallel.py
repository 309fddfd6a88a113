"""Tensor parallelism with float8 matmuls gives what one process gives, and sends float8."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.slow
def test_four_ranks_agree_with_one(tmp_path: Path) -> None:
    """Four ranks in a row, then two by two with FSDP2."""
    output = run_ranks(WORKER, 4, tmp_path)
    for name in ("tensorwise", "rowwise", "dense", "with FSDP2"):
        assert name in output, output
