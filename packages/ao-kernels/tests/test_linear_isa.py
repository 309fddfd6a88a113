"""The tests of every kernel again with each other instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ao_kernels.cpu import library

#: every kernel; the grids of the suites are for one set, and the C++ tests for all. Threads are those of the
#: drivers, which all sets share
FILES = (
    *("test_linear.py", "test_embedding.py", "test_quantize_rows.py"),
    *("test_quantize_formats.py", "test_tiles_ops.py", "test_adam.py", "test_block_sparse.py"),
    *("test_two_four.py", "test_super_blocks.py", "test_hadamard.py", "test_attend.py"),
    *("test_blocks.py",),
)
#: in which sets differ that share the rest: some have their own matmuls alone
MATMULS = ("test_linear.py", "test_threads.py", "test_super_blocks.py")
SHARED = {("amx", "avx512"): MATMULS, ("avx2", "avx2_vnni"): MATMULS}
#: what does not depend on the instruction set
LEFT_OUT = "is_a_candidate or reasons or describes or fork"
WHY_NOT = "from ao_kernels.cpu import library; print(library.unavailable() or '')"


def reason(isa: str) -> str:
    """Why an instruction set cannot be used; empty if it can."""
    done = subprocess.run(
        [sys.executable, "-c", WHY_NOT], env={**os.environ, "AO_CPU_ISA": isa}, capture_output=True,
        text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa",
    [
        *("generic", "avx2", "avx2_vnni", "avx512_vnni", "avx512", "amx"),
        *("neon", "neon_dotprod", "neon_i8mm"),
    ],
)
def test_with(isa: str) -> None:
    """Nothing is left out silently: a set that cannot be used says that the processor lacks it."""
    if isa == library.isa():
        return  # what the tests of this process use
    if text := reason(isa):
        assert isa in text
        return
    here = Path(__file__).parent
    config = here.parent / "pyproject.toml"
    marks = ["-m", "not slow", "-k", f"not ({LEFT_OUT})"]
    files = SHARED.get((library.isa(), isa), FILES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", str(config),
         *marks, *(str(here / name) for name in files)],
        env={**os.environ, "AO_CPU_ISA": isa}, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
