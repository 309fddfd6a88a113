"""The whole demo, with few texts and recipes."""

from __future__ import annotations

import json
from pathlib import Path

import demo
import pytest


@pytest.mark.slow
def test_demo(
    tmp_path: Path,
    few_sources: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [
        "--pairs=20",
        "--seconds=0.1",
        "--recipes=^int8_weight_only$|int8 embeddings|float8/rowwise$",
    ]
    monkeypatch.setattr("sys.argv", ["demo.py", *options, "--out", str(tmp_path)])
    demo.main()

    printed = capsys.readouterr().out
    assert "outputs are bit-equal" in printed
    assert "left out: float8/rowwise" in printed
    assert "int8_weight_only" in (tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    variants = {variant["name"]: variant for variant in data["variants"]}
    assert set(variants) == {
        "fp32",
        "bf16",
        "int8_weight_only",
        "int8 + int8 embeddings",
        "int4 g32 + int8 embeddings",
    }
    assert 27 < variants["int8_weight_only"]["quality"]["output_sqnr_db"] < 36
    assert 9 < variants["int4 g32 + int8 embeddings"]["quality"]["output_sqnr_db"] < 17
    fp32, smallest = variants["fp32"], variants["int4 g32 + int8 embeddings"]
    assert 0.15 < smallest["disk_bytes"] / fp32["disk_bytes"] < 0.22
    for name, variant in variants.items():
        # files have headers, layouts in memory may have tables
        assert 0.99 < variant["disk_bytes"] / variant["memory_bytes"] < 1.01
        for latency in variant["latency"].values():
            assert set(latency) == {"fp32", "bf16"} - {"fp32": {"bf16"}, "bf16": {"fp32"}}.get(
                name, set()
            )
