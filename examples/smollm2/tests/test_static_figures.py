"""The committed figures of static scales of SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROWS = json.loads((Path(__file__).parents[1] / "static.json").read_text(encoding="utf-8"))["rows"]
FOUND = {(row["format"], row["activations"]): row for row in ROWS}


@pytest.mark.parametrize("name", ["int8", "int8 with zero points", "float8"])
def test_the_default_is_safe(name):
    dynamic = FOUND[name, "dynamic"]["kl_nats"]
    assert FOUND[name, "static"]["kl_nats"] <= 1.5 * dynamic
    assert FOUND[name, "SmoothQuant, static"]["kl_nats"] <= 1.2 * dynamic
    row = FOUND[name, "static"]
    assert len(row["left_dynamic"]) == row["weights"] - row["static"]
