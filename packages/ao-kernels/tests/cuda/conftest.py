"""The emulation of the CUDA matmul, compiled once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def emulation() -> ModuleType:
    import emulation

    return emulation


@pytest.fixture(scope="session")
def exe(emulation: ModuleType) -> Path:
    """The program, watched by the sanitizers of addresses and of undefined behaviour."""
    return emulation.program("address,undefined")
