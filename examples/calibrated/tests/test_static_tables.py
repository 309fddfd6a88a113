"""The committed figures of static scales of SmolLM2 and MiniLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["int8", "int8 with zero points", "float8"])
@pytest.mark.parametrize(("folder", "loss"), [("smollm2", "kl_nats"), ("minilm", "noise")])
def test_the_default_is_safe(folder, loss, name):
    rows = json.loads((EXAMPLES / folder / "static.json").read_text(encoding="utf-8"))["rows"]
    found = {row["activations"]: row for row in rows if row["format"] == name}
    dynamic = found["dynamic"][loss]
    assert found["static"][loss] <= 1.5 * dynamic
    assert found["SmoothQuant, static"][loss] <= 1.2 * dynamic
    row = found["static"]
    assert len(row["left_dynamic"]) == row["weights"] - row["static"]
