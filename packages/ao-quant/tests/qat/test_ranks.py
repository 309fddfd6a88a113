"""Prepared models on several processes: FSDP2, DDP and distributed checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")


def test_two_ranks(tmp_path: Path) -> None:
    output = run_ranks(WORKER, 2, tmp_path, "weights")
    assert "weights: [" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_cases(ranks: int, tmp_path: Path) -> None:
    cases = ("weights", "activations", "learned")
    output = run_ranks(WORKER, ranks, tmp_path, *cases)
    for name in cases:
        assert f"{name}: [" in output, output
