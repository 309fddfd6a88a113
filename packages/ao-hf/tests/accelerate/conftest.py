"""The tests here share a model: `small`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    """accelerate keeps the precision of the first `Accelerator` of a process for all."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
