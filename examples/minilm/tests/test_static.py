"""The script that makes the figures of static scales, with few texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import static_scales as static

ROWS = json.loads(Path(static.__file__).with_name("static.json").read_text(encoding="utf-8"))[
    "rows"
]


@pytest.mark.slow
def test_the_script_goes_on_where_it_was(tmp_path, few_sources, monkeypatch):
    monkeypatch.setattr(static, "PAIRS", 6)
    monkeypatch.setattr(static, "CALIBRATION", 2)
    target = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["static.py", "--json", str(target)])
    kept = [row for row in ROWS if row["activations"] != "static, keep"]
    target.write_text(json.dumps({"rows": kept}), encoding="utf-8")
    static.main()
    rows = json.loads(target.read_text(encoding="utf-8"))["rows"]
    assert rows[: len(kept)] == kept
    assert {row["format"] for row in rows[len(kept) :]} == {row["format"] for row in kept}
    assert all(row["static"] == row["weights"] == 37 for row in rows[len(kept) :])
