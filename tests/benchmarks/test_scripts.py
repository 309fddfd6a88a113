"""Every benchmark that needs nothing but the packages runs, at a tiny size, and records what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workspace import ROOT

OVERHEAD = ROOT / "packages" / "ao-core" / "benchmarks" / "bench_overhead.py"
IMPORT_TIME = ROOT / "packages" / "ao-core" / "benchmarks" / "bench_import_time.py"
QUANTIZE_TIME = ROOT / "packages" / "ao-quant" / "benchmarks" / "bench_quantize_time.py"


def rows(script: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that a benchmark writes."""
    path = folder / "result.json"
    subprocess.run([sys.executable, script, "--json", path, *options], check=True)
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len({tuple(row) for row in found}) == 1  # all have the same columns
    return found


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    found = rows(OVERHEAD, tmp_path, "--rounds=2", "--repeats=3")
    assert {row["layer"] for row in found} == {"64×64", "256×256"}
    assert {row["mode"] for row in found} == {"no_grad", "inference_mode"}
    names = {row["contender"] for row in found}
    assert {"nn.Linear", "dispatch", "int8", "int8, bare kernel"} <= names
    assert all(row["µs"] > 0 for row in found)
    assert all(row["× nn.Linear"] == 1 for row in found if row["contender"] == "nn.Linear")
    assert all(
        (row["over its kernel, µs"] != "") == (row["contender"] in {"int8", "int4", "int8 dynamic"})
        for row in found
    )


@pytest.mark.slow
def test_import_time(tmp_path: Path) -> None:
    first, *others = rows(IMPORT_TIME, tmp_path, "--rounds=1")
    assert first["statement"] == "import torch"
    for row in others:
        assert 0 < row["added ms"] < first["added ms"]
        assert 0 < row["modules added"] < 200


@pytest.mark.slow
def test_quantize_time(tmp_path: Path) -> None:
    found = rows(QUANTIZE_TIME, tmp_path, "--rounds=1", "--parameters=1")
    by_recipe = {row["recipe"]: row for row in found}
    assert by_recipe["copy"]["after GB"] == by_recipe["copy"]["model GB"]
    model = by_recipe["copy"]["model GB"]
    assert 0.5 < by_recipe["int8_weight_only"]["after GB"] / model < 0.51
    assert 0.25 < by_recipe["int4_weight_only"]["after GB"] / model < 0.27
    assert all(row["seconds"] > 0 and row["peak over model GB"] > 0 for row in found)
