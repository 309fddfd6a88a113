"""Two processes that learn scales together do as one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks


@pytest.mark.slow
def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    output = run_ranks(Path(__file__).with_name("extras_worker.py"), 2, tmp_path)
    for name in ("rows", "groups", "tensor"):
        assert f"{name}: [" in output, output
