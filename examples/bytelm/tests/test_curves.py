"""Comparing recipes: what is trained, what is kept, and the table and plot that are made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import curves
import pytest
import torch
from bytelm import data, precision
from bytelm.data import Corpus
from bytelm.model import ByteLM, ModelConfig, initialize, load
from bytelm.record import record

from ao_core import ComputeWeight
from ao_core.ext import UnknownNameError
from ao_sparsity import SemiSparseLinear

TEXT = b"def square(x):\n    return x * x\n\n" * 40
OPTIONS = "--steps 4 --batch 2 --context 24 --measure-every 2 --measure-windows 4 --seeds 0 1"
OPTIONS += " --warmup 1 --matrix-lr 0.1 --other-lr 0.1"


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(data.tokens(TEXT), data.tokens(TEXT[7:400]), {"files": 1})


@pytest.fixture
def run(config: ModelConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(curves, "SMALL", config)
    monkeypatch.setattr(data, "read_corpus", lambda: corpus)

    def call(*arguments: str) -> dict:
        files = [
            "--json",
            f"{tmp_path}/r.json",
            "--plot",
            f"{tmp_path}/p.png",
            "--out",
            f"{tmp_path}",
        ]
        monkeypatch.setattr(sys, "argv", ["curves.py", *OPTIONS.split(), *files, *arguments])
        curves.main()
        return json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))

    return call


def test_runs_are_added(run, tmp_path: Path) -> None:
    first = run("--recipes", "bf16")
    assert [(r["recipe"], r["seed"]) for r in first["runs"]] == [("bf16", 0), ("bf16", 1)]
    both = run("--recipes", "bf16", "float8/rowwise")
    assert both["runs"][:2] == first["runs"]
    new = both["runs"][2:]
    assert [(r["recipe"], r["seed"]) for r in new] == [("float8/rowwise", s) for s in (0, 1)]
    assert [point["step"] for point in new[0]["curve"]] == [2, 4]
    assert new[0]["bits_per_byte"] != first["runs"][0]["bits_per_byte"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="use another --json"):
        run("--batch", "4")
    means = curves.mean_curve(both["runs"], "bf16")
    ends = [r["bits_per_byte"] for r in first["runs"]]
    assert means[4] == pytest.approx(sum(ends) / 2)


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    from generate_training_curves import recipes

    ends = {"bf16": (2.0, 3.0), "tensorwise": (2.1, 2.95), "rowwise": (2.02,)}
    runs = [
        {"recipe": name, "seed": seed, "bits_per_byte": value}
        for name, values in ends.items()
        for seed, value in enumerate(values)
    ]
    lines = recipes(runs).splitlines()
    assert lines[2] == "| bf16 | 2.0000 | 3.0000 | 2.5000 | – |"
    assert lines[3] == "| `tensorwise` | 2.1000 | 2.9500 | 2.5250 | +1.00 % |"
    assert lines[4] == "| `rowwise` | 2.0200 | – | 2.0200 | +1.00 % |"


def test_recipes_by_name(config: ModelConfig) -> None:
    model = ByteLM(config)
    precision.convert(model, "bf16")
    assert not any(isinstance(p, ComputeWeight) for p in model.parameters())
    precision.convert(model, "int8_mixed_precision_training")
    matrices = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert [isinstance(weight, ComputeWeight) for weight in matrices] == [True] * 14 + [False]
    with pytest.raises(UnknownNameError, match="no_such"):
        precision.convert(model, "no_such")


@pytest.mark.parametrize(("recipe", "sparse"), [("semi_sparse", 14), ("semi_sparse_mlp", 6)])
def test_sparse_recipes(config: ModelConfig, recipe: str, sparse: int) -> None:
    model = ByteLM(config)
    precision.convert(model, recipe)
    assert sum(isinstance(m, SemiSparseLinear) for m in model.modules()) == sparse


def test_optimizers_by_name() -> None:
    assert precision.optimizer_class("Muon") is torch.optim.Muon
    with pytest.raises(UnknownNameError, match="lr_scheduler"):
        precision.optimizer_class("lr_scheduler")


def test_a_model_in_training_is_saved_plain(
    config: ModelConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytelm.record.WINDOWS", 8)
    model = ByteLM(config)
    initialize(model, 0)
    precision.convert(model, "float8/rowwise")
    point = {"step": 1, "bytes": 9, "seconds": 1.0, "train_bits_per_byte": 9, "bits_per_byte": 8}
    record(model, corpus, [point], {"context": 24}, tmp_path)
    saved, trained = (each.model.layers[0].mlp.up_proj.weight for each in (load(tmp_path), model))
    assert type(saved) is torch.nn.Parameter
    assert torch.equal(saved, trained.memory.bfloat16().float())
