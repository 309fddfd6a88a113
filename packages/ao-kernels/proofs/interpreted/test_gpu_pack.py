"""The benchmark's parts that call Triton alone go through all they do, at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN_ALL = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run_all.py"


@pytest.mark.slow
def test_matmuls_and_casts():
    command = [sys.executable, RUN_ALL, "--device=cpu", "--tiny", "--parts=two_operands,casts"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["two_operands: 10 lines", "casts: 18 lines"]
