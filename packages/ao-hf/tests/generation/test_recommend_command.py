"""`ao recommend`: what `recommend` finds for a language model, its files, and its errors."""

from __future__ import annotations

import json

import pytest

from ao_hf.generation import load

SMALL = ("--tokens", "80", "--window", "40", "--rounds", "1", "--device", "cpu")
RECIPES = ("--recipe", "int8_weight_only", "--recipe", "int4_weight_only")


def test_the_command(ao, folder, tmp_path):
    rows = tmp_path / "rows.json"
    result = ao("recommend", folder, *SMALL, *RECIPES, "--max-loss", "10", "--json", rows)
    assert result.exit_code == 0, result.output
    found = json.loads(rows.read_text(encoding="utf-8"))
    assert [row["config"] for row in found["rows"]] == [
        "dense",
        "int8_weight_only",
        "int4_weight_only",
    ]
    assert all(row["seconds"] > 0 and row["loss"] < 10 for row in found["rows"])
    assert 0 < found["rows"][1]["loss"] < found["rows"][2]["loss"]
    assert "tokens/s" in result.stdout
    assert "recommended" in result.stdout


def test_a_budget_and_its_configuration(ao, folder, tmp_path):
    out = tmp_path / "best.json"
    result = ao("recommend", folder, *SMALL, *RECIPES, "--budget", "150kB", "--out", out)
    assert result.exit_code == 0, result.output
    assert f"ao quantize {folder} DST --config {out}" in result.stdout
    config = json.loads(out.read_text(encoding="utf-8"))
    assert load(folder, config["name"], device="cpu").quantized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "int4_weight_onyl"), "Did you mean 'int4_weight_only'"),
        (("--budget", "1kB"), "no candidate fits; the smallest is"),
        (("--budget", "1MB", "--max-loss", "1"), "give one of the two"),
        (("--data", "absent.txt"), "--data absent.txt: cannot be read"),
        (("--out", "absent/out.json"), "--out absent/out.json: there is no directory absent"),
    ],
)
def test_bad_input_is_one_line(ao, folder, arguments, message):
    result = ao("recommend", folder, *SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
