"""Processes that train a model with low-precision products together do as one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("training_worker.py")
CASES = ("tensorwise", "tensorwise-bf16", "int8-tensor", "squares", "rows")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, CASES), (4, CASES[:1])])
def test_ranks_agree_with_one(ranks: int, names: tuple[str, ...], tmp_path: Path) -> None:
    output = run_ranks(WORKER, ranks, tmp_path, *names)
    for name in (*names, "refusals and tied weights"):
        assert name in output, output
