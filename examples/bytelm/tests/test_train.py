"""The loop: it learns, resumes without a trace, and processes agree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bytelm import data
from bytelm.data import Corpus
from bytelm.model import ByteLM, ModelConfig, initialize
from bytelm.record import record
from bytelm.train import CURVE, TrainConfig, loss_of, optimizers, schedule, train

WORKER = Path(__file__).with_name("train_worker.py")
TEXT = b"def square(x):\n    return x * x\n\n" * 40
SHORT = TrainConfig(
    steps=4, batch=4, context=24, warmup=1, cooldown=2, measure_every=2, measure_windows=8
)


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(data.tokens(TEXT), data.tokens(TEXT[7:400]), {"files": 1})


def fresh(config: ModelConfig) -> ByteLM:
    made = ByteLM(config)
    initialize(made, seed=0)
    return made


def test_it_learns(config: ModelConfig, corpus: Corpus, tmp_path: Path) -> None:
    curve = train(fresh(config), corpus, replace(SHORT, steps=60, cooldown=30), tmp_path)
    assert [point["step"] for point in curve] == list(range(2, 61, 2))
    assert curve[-1]["bytes"] == 60 * 4 * 24
    assert 7 < curve[0]["train_bits_per_byte"] < 8.2
    assert 0 < curve[-1]["bits_per_byte"] < 1.5
    saved = json.loads((tmp_path / CURVE).read_text(encoding="utf-8"))
    assert saved["curve"] == curve


def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    config: ModelConfig, corpus: Corpus, tmp_path: Path
) -> None:
    whole, stopped = fresh(config), fresh(config)
    curve = train(whole, corpus, SHORT, tmp_path / "whole")
    # stopped after two steps, by an error
    calls = []

    def fails(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss_of(model, windows)

    with pytest.raises(KeyboardInterrupt):
        train(stopped, corpus, SHORT, tmp_path / "stopped", fails)
    resumed = fresh(config)
    again = train(resumed, corpus, SHORT, tmp_path / "stopped")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name
    times = {"seconds": 0.0}
    assert [point | times for point in curve] == [point | times for point in again]
    assert not torch.equal(whole.lm_head.weight, fresh(config).lm_head.weight)


def test_schedule() -> None:
    config = TrainConfig(steps=100, warmup=10, cooldown=40)
    shares = [schedule(step, config) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9:61] == [1.0] * 52
    assert shares[80] == pytest.approx(0.5)
    assert shares[99] == pytest.approx(1 / 40)
    assert shares[100] == 0


def test_muon_has_the_matrices_of_the_layers_and_adam_the_rest(config: ModelConfig) -> None:
    model = fresh(config)
    muon, adam = optimizers(model, SHORT)
    sizes = [sum(p.numel() for g in o.param_groups for p in g["params"]) for o in (muon, adam)]
    assert sizes[1] == 2 * 256 * 36 + 5 * 36
    assert sum(sizes) == sum(p.numel() for p in model.parameters())


def test_a_batch_that_processes_cannot_share(
    config: ModelConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytelm.train._process", lambda: (0, 3))
    with pytest.raises(ValueError, match="batch=4 cannot be shared by 3 processes"):
        train(fresh(config), corpus, SHORT, tmp_path)


@pytest.mark.slow
def test_two_processes_hold_the_same_model(
    config: ModelConfig, corpus: Corpus, tmp_path: Path
) -> None:
    torch.save((config, corpus, SHORT), tmp_path / "given.pt")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    alone = fresh(config)
    train(alone, corpus, SHORT, tmp_path / "alone")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not torch.equal(first["lm_head.weight"], alone.lm_head.weight)


def test_record(
    model: ByteLM, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytelm.record.WINDOWS", 8)
    bits = {"train_bits_per_byte": 1.9, "bits_per_byte": 2.0}
    curve = [{"step": s, "bytes": 9 * s, "seconds": 1.5 * s} | bits for s in (1, 2)]
    figures = record(model, corpus, curve, {"steps": 2, "context": 24}, tmp_path)
    assert figures["training"] == {"steps": 2, "context": 24, "bytes": 18, "seconds": 3.0}
    assert figures["measured"] == {"context": 24, "windows": 8, "bytes": 96}
    assert json.loads((tmp_path / "figures.json").read_text(encoding="utf-8")) == figures
    lines = (tmp_path / "curve.csv").read_text(encoding="utf-8").splitlines()
    header = "step,bytes,seconds,train_bits_per_byte,bits_per_byte"
    assert lines == [header, "1,9,1.5,1.9,2.0", "2,18,3.0,1.9,2.0"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
