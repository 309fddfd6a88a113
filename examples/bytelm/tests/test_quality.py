"""The figures of quantized variants, and the page that is written from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import quality
import torch
from bytelm import cases
from bytelm.cases import Case
from bytelm.model import ByteLM, ModelConfig, initialize

import generate_quality
from ao_core import WeightOnlyConfig
from ao_core.ext import registry


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(256, (20, 32), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model() -> ByteLM:
    """Rows of 144 and 176: groups of 32, 64 and 128 are ragged in some."""
    made = ByteLM(
        ModelConfig(
            hidden_size=144,
            intermediate_size=176,
            num_hidden_layers=1,
            num_attention_heads=6,
            num_key_value_heads=3,
        )
    )
    initialize(made, seed=0)
    for parameter in made.parameters():
        parameter.data.mul_(6 if parameter.ndim == 2 else 1)
    return made.eval().requires_grad_(False)


def test_every_recipe_and_every_format_is_a_case() -> None:
    names = {case.name for case in cases.recipes()}
    assert {"int8_weight_only", "float8/rowwise"} <= names
    formats = cases.formats()
    assert {"int8", "uint3", "nf4", "f6e2m3", "ternary"} <= {case.name for case in formats}
    each = {(case.scales, case.group) for case in formats if case.name == "uint3"}
    assert each == {
        (scales, group) for scales in registry.scale_methods.names() for group in cases.GROUPS
    }
    zeros = {case.name: case.config.zero_point for case in formats}
    assert (zeros["uint3"], zeros["int3"], zeros["f6e2m3"]) == ("int", "none", "none")


def test_more_bits_and_smaller_groups_are_better(model: ByteLM, windows: torch.Tensor) -> None:
    chosen = [
        Case(
            "format",
            f"uint{bits}",
            WeightOnlyConfig(f"uint{bits}", group, zero_point="int"),
            group,
            "absmax",
        )
        for bits in (3, 5)
        for group in (16, "row")
    ]
    rows, left_out = quality.byte_model(model, windows, chosen)
    original, *found = rows
    assert not left_out
    assert (original["kl_bits"], original["agreement"], original["table"]) == (0, 1, "original")
    kl = {(row["name"], row["group"]): row["kl_bits"] for row in found}
    assert kl["uint5", 16] < kl["uint5", "row"] < kl["uint3", 16] < kl["uint3", "row"]
    assert kl["uint5", 16] > 1e-6
    agreement = [row["agreement"] for row in found]
    assert 0 < agreement[1] < agreement[2] < 1
    # 5 bits, and float32 scales and zero points of a byte in every 16
    assert found[2]["bits"] == pytest.approx(5 + 5 * 8 / 16, abs=0.2)


def test_a_recipe_for_training_is_left_out(model: ByteLM, windows: torch.Tensor) -> None:
    chosen = [case for case in cases.recipes() if case.name == "float8/rowwise"]
    rows, left_out = quality.byte_model(model, windows, chosen)
    assert len(rows) == 1
    assert left_out == {
        "float8/rowwise": "a recipe for training: its weights stay in high precision"
    }


def test_predict_in_threads_changes_nothing(model: ByteLM, windows: torch.Tensor) -> None:
    found = quality.predict(model, windows)
    assert torch.equal(found, quality.evaluate.predict(model, windows))


@pytest.mark.slow
def test_script_and_page(
    tmp_path: Path, few_sources: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quality.json"
    few = [
        case
        for case in cases.formats()
        if (case.name, case.scales) in {("uint4", "absmax"), ("uint4", "mse")} and case.group != 64
    ]
    monkeypatch.setattr(cases, "formats", lambda: few)
    options = ["--only=^recipe (int8_weight_only$|float8/rowwise$)|^format uint4", "--windows=2"]
    monkeypatch.setattr(sys, "argv", ["quality.py", "--json", str(path), *options, "--pairs=10"])
    quality.main()
    data = json.loads(path.read_text(encoding="utf-8"))
    sections = generate_quality.sections(data)
    recipes = sections["recipes"].splitlines()
    assert recipes[2].startswith("| float32 | – | 0.00000 |")
    assert recipes[3].startswith("| `int8_weight_only` | 8.209 | 0.00")
    assert recipes[-1] == (
        "- `float8/rowwise`: a recipe for training: its weights stay in high precision."
    )
    assert "| format | scales | groups of 32 |" in sections["formats kl_bits"]
    assert "| `uint4` | absmax | 0." in sections["formats agreement"]
    assert [row["name"] for row in data["minilm"]] == ["float32", "int8_weight_only"]
    assert "| float32 | 90." in sections["minilm"]


def test_an_update_keeps_the_other_rows_and_says_when() -> None:
    about = dict.fromkeys(("corpus", "windows", "context", "pairs", "tokens"), 1)
    run = dict.fromkeys(("date", "cpu", "python", "torch", "ao-core"), "old")

    def found(now: str, *names: str) -> dict[str, object]:
        rows = [{"table": "recipe", "name": name, "kl_bits": now} for name in names]
        told = about | dict.fromkeys(run, now)
        return {"about": told, "byte_model": rows, "left_out": {}, "minilm": rows}

    merged = quality.updated(found("old", "a", "b"), found("new", "b", "c"), "^[bc]")
    assert [row["kl_bits"] for row in merged["byte_model"]] == ["old", "new", "new"]
    assert merged["about"]["date"] == "old"
    (update,) = merged["about"]["updates"]
    assert (update["date"], update["only"]) == ("new", "^[bc]")
    other = found("new", "b")
    other["about"] = about | {"windows": 2}
    with pytest.raises(SystemExit, match="windows was 1, and is 2"):
        quality.updated(found("old", "a"), other, "")
