"""A sample of `mutations.py`: damaged checkpoints are read or refused, and nothing else happens."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ao_quant.interchange.records import INTERCHANGE

MUTATIONS = runpy.run_path(str(Path(__file__).with_name("mutations.py")))


@pytest.mark.parametrize("form", INTERCHANGE, ids=lambda form: form.name)
def test_damaged_checkpoints_are_read_or_refused(form) -> None:
    if form.name == "onnx":
        pytest.importorskip("onnx")
    counts = MUTATIONS["run"](form, 40, seed=0)
    assert counts["error"] >= 5
    assert sum(counts.values()) == 40
