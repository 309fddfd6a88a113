"""Processes that train a model with low-precision matmuls together do as one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("training_worker.py")
CASES = ("tensorwise", "tensorwise-bf16", "int8-tensor", "squares", "rows")


@pytest.mark.slow
def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    output = run_ranks(WORKER, 2, tmp_path, *CASES)
    for name in (*CASES, "refusals and tied weights"):
        assert name in output, output
