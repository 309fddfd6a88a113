"""Models that are tuned before they serve, and the command for it."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import ConfigError
from ao_kernels.triton.shared import device
from ao_kernels.triton.tuning import ahead
from ao_kernels.triton.tuning.choose import Case, Tuner
from ao_kernels.triton.tuning.store import Device, Problem, Record, store_of
from ao_kernels.tune.commands import tune

PROBLEM = Problem("matmul", ("int4",), 48, 64, 16)


@pytest.fixture
def ao(tmp_path, monkeypatch):
    """The command, with a cache of its own."""
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    return lambda *arguments: CliRunner().invoke(tune, [*map(str, arguments)])


@pytest.fixture
def kept(ao):
    store = store_of(Device("Some GPU", 90), "3.6.0")
    setting = {"rows": 16, "splits": 4}
    store.keep(PROBLEM, Record(str(PROBLEM), setting, ((setting, 8.25),), ({"rows": 32},)))


def test_nothing_to_show(ao):
    assert ao("show").output == "nothing was measured here yet\n"
    assert json.loads(ao("show", "--json").output) == []
    assert ao("clear").output == "dropped 0 file(s)\n"


@pytest.mark.usefixtures("kept")
def test_shown_exported_and_dropped(ao, tmp_path):
    shown = ao("show").output
    assert "matmul int4 n=48 k=64 m<=16  rows=16 splits=4" in shown
    assert "8.2, 1 not tried" in shown
    (record,) = json.loads(ao("show", "--json").output)
    assert record["device"] == {"name": "Some GPU", "arch": 90}
    assert record["setting"] == {"rows": 16, "splits": 4}
    assert ao("export", tmp_path / "out").exit_code == 0
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "some-gpu-sm-90.json"
    assert len(json.loads(file.read_text())["records"]) == 1
    assert ao("clear").output == "dropped 1 file(s)\n"
    assert ao("show").output == "nothing was measured here yet\n"


def test_without_a_gpu_there_is_nothing_to_tune(ao, monkeypatch):
    reason = "no CUDA device is available"
    for module in (device, ahead):
        monkeypatch.setattr(module, "unavailable", lambda: reason)
    with pytest.raises(ConfigError, match="there is nothing to tune"):
        ahead.tune(nn.Linear(3, 4))
    done = ao("model", "x")
    assert (done.exit_code, done.stderr) == (2, f"ao: there is nothing to tune: {reason}\n")


def test_each_weight_is_multiplied_by_each_number_of_rows(monkeypatch, store):
    tuner = Tuner(store, lambda run: run() or 1e-6, capturing=lambda: False)
    shapes = []

    def matmul(x, w):
        shapes.append((tuple(x.shape), x.dtype, tuple(w.shape)))
        problem = Problem("matmul", (), *w.shape, len(x))
        setting = Record("of a rule", {})
        tuner.decide(Case(problem, w.device, setting, lambda: (setting,)), lambda each: None)

    monkeypatch.setattr(ahead, "tuner_of", lambda device: tuner)
    monkeypatch.setattr(QTensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(F, "linear", matmul)
    weight = quantize_tensor(torch.ones(48, 64).bfloat16(), Spec("int8", (1, -1)))
    dense, experts = torch.ones(3, 4), quantize_tensor(torch.ones(2, 48, 64), Spec("int8", (1, -1)))
    found = ahead.tune_weights([dense, experts, weight], rows=(1, 8))
    assert shapes == [((m, 64), torch.bfloat16, (48, 64)) for m in (1, 8)]
    assert [each.problem for each in found] == [f"matmul  n=48 k=64 m<={m}" for m in (1, 8)]
    assert {each.source for each in found} == {"rule"}
    with pytest.raises(ConfigError, match="numbers of rows are 1 or more"):
        ahead.tune_weights([weight], rows=(0, 1))


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("ao_kernels.tune", run_name="__main__")
    assert exit_info.value.code == (
        "python -m ao_kernels.tune needs the package 'typer', which is not installed. "
        'Install it with: pip install "ao-core[cli]"'
    )
