"""The committed results of pruning, and the script that makes them, with few texts."""

from __future__ import annotations

import json
from pathlib import Path

import pruning
import pytest

RESULTS = json.loads(Path(pruning.__file__).with_name("pruning.json").read_text(encoding="utf-8"))


def test_better_methods_leave_more_of_the_model():
    found = {(row["budget"], row["method"]): row for row in RESULTS["rows"]}
    assert len(found) == 1 + sum(map(len, pruning.VARIANTS.values()))
    for budget in ("2:4", "50%, each layer"):
        rows = [found[budget, method] for method in ("magnitude", "Wanda", "SparseGPT")]
        for measure in ("agreement", "cosine_mean", "output_sqnr_db"):
            worst, middle, best = (row[measure] for row in rows)
            assert worst < middle < best, (budget, measure)
        assert {row["removed"] for row in rows} == {rows[0]["weights"] // 2}
    assert found["–", "dense"]["agreement"] == 1


@pytest.mark.slow
def test_the_script_goes_on_where_it_was(tmp_path, few_sources, monkeypatch):
    monkeypatch.setattr(pruning, "PAIRS", 6)
    monkeypatch.setattr(pruning, "CALIBRATION", 2)
    variants = {"2:4": {name: pruning.VARIANTS["2:4"][name] for name in ("magnitude", "Wanda")}}
    monkeypatch.setattr(pruning, "VARIANTS", variants)
    target = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["pruning.py", "--json", str(target)])
    before = RESULTS["rows"][:2]  # the dense model, and magnitude
    target.write_text(json.dumps({"rows": before}), encoding="utf-8")
    pruning.main()
    rows = json.loads(target.read_text(encoding="utf-8"))["rows"]
    assert rows[:2] == before
    (added,) = rows[2:]
    assert (added["budget"], added["method"], added["removed"]) == ("2:4", "Wanda", 5382144)
    assert 0.5 < added["cosine_mean"] < 0.95
