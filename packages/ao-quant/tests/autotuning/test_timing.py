"""Rounds, percentiles and the cache: with clocks of the test's own."""

from __future__ import annotations

import json
import math
from collections import Counter
from unittest import TestCase

import pytest
import torch
from torch import nn

from ao_quant import autoquant
from ao_quant.autotuning import cache as caching
from ao_quant.autotuning.cache import Cache, default_folder, machine
from ao_quant.timing import Trial, measure, stopwatch

CPU = torch.device("cpu")


def trials(*names):
    return [Trial("layer", name, (), CPU) for name in names]


def test_rounds_are_interleaved_and_each_has_another_order():
    seen = []
    measure(trials("a", "b", "c"), lambda trial: seen.append(trial.name) or 0.0, rounds=40)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert len(rounds) == 42
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6


def test_the_tenth_percentile_without_the_warmups():
    times = {
        "a": [9.0, 0.001, *(0.001 * n for n in range(30, 10, -1))],
        "b": [0.0, 0.0, *[0.02] * 20],
    }
    clock = {name: iter(values) for name, values in times.items()}
    a, b = measure(trials("a", "b"), lambda trial: next(clock[trial.name]), rounds=20)
    assert a == pytest.approx(0.013)  # the third least of 20, from 0.011 on
    assert b == 0.02


def test_slow_layers_have_fewer_rounds():
    count = 0

    def slow(trial):
        nonlocal count
        count += 1
        return 10.0

    assert measure(trials("a", "b"), slow, rounds=100) == [10.0, 10.0]
    assert count == 2 * (2 + 5)


def test_slow_models_are_left_out_after_three_rounds_and_layers_never():
    seconds = {"a": 1.0, "b": 1.2, "c": 1.5}

    def counted(fqn):
        seen = Counter()
        models = [Trial(fqn, name, (), CPU) for name in seconds]
        found = measure(models, lambda t: seen.update([t.name]) or seconds[t.name], 10, math.inf)
        assert found == list(seconds.values())
        return dict(seen)

    assert counted("") == {"a": 10, "b": 10, "c": 3}
    assert counted("layer") == {"a": 12, "b": 12, "c": 12}


def test_short_models_run_in_a_row_after_an_untimed_run():
    runs, timed = [], []
    model = Trial("", "dense", ((lambda: runs.append(1), 1),), CPU)
    clock = iter([0.016, 0.01, 0.01, *[0.02] * 1000])
    (seconds,) = measure([model], lambda t: timed.append(1) or next(clock), rounds=1)
    assert len(timed) == 3  # another would go beyond 0.05 seconds
    assert seconds == pytest.approx(0.036 / 3)
    assert len(runs) == 1
    measure([model], lambda t: timed.append(1) or 1e-6, rounds=1)
    assert len(timed) == 3 + 20


def test_a_trial_makes_every_call_as_often_as_the_model():
    calls = []
    trial = Trial("l", "dense", ((lambda: calls.append(1), 3), (lambda: calls.append(2), 1)), CPU)
    seconds = stopwatch(trial)
    assert calls == [1, 1, 1, 2]
    assert seconds > 0


KEY = {"machine": {"threads": 1}, "weight": [[2, 3], "torch.float32"]}


def test_what_is_written_is_read(tmp_path):
    store = Cache(tmp_path / "deep" / "folder")
    assert store.read(KEY) is None
    store.write(KEY, {"dense": 1.5, "int8": 0.5})
    assert store.read(KEY) == {"dense": 1.5, "int8": 0.5}
    assert store.read({**KEY, "compiled": True}) is None
    (file,) = (tmp_path / "deep" / "folder").iterdir()
    assert json.loads(file.read_text())["key"] == KEY  # people can see what a file is about
    nothing = Cache(None)
    nothing.write(KEY, {"dense": 1.0})
    assert nothing.read(KEY) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1', '{"format": 1, "key": {}, "seconds": {"dense": "x"}}']
)
def test_a_damaged_file_is_measured_anew(tmp_path, text):
    store = Cache(tmp_path)
    store.write(KEY, {"dense": 1.5})
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert store.read(KEY) is None
    store.write(KEY, {"dense": 2.5})
    assert store.read(KEY) == {"dense": 2.5}


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with TestCase().assertLogs("ao_quant", "WARNING") as logged:
        Cache(tmp_path / "file" / "folder").write(KEY, {"dense": 1.0})
    assert "timings cannot be kept in" in logged.output[0]


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "autoquant"
    monkeypatch.delenv("AO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = default_folder()
    assert folder.parts[-2:] == ("ao", "autoquant")


def test_times_are_kept_for_a_machine_threads_versions_and_shapes(tmp_path, monkeypatch):
    count = 0

    def clock(trial):
        nonlocal count
        count += 1
        return 1.0 if trial.name == "dense" else 0.5

    def run(rows=2, width=16, **arguments):
        nonlocal count
        count = 0
        model = nn.Sequential(nn.Linear(width, 8))
        result = autoquant(
            model, torch.ones(rows, width), candidates=["int8_weight_only"], rounds=1,
            cache=tmp_path, timer=clock, **arguments,
        )  # fmt: skip
        (layer,) = result.layers
        assert layer.picked == 1
        assert layer.cached == (count == 0)
        return count

    # of two candidates three rounds for the layer, one for the whole model, and three more at the end
    assert run() == 14
    assert run() == 0
    assert run(rows=3) == 14
    assert run(width=24) == 14
    assert run() == 0
    assert len(list(tmp_path.iterdir())) == 9  # of the layer and, twice, of the model
    known = machine(CPU)
    assert known["device"].startswith("cpu ")
    for part in known:
        changed = {**known, part: "other"}
        with monkeypatch.context() as patch:
            for where in ("layers", "whole"):
                patch.setattr(f"ao_quant.autotuning.{where}.machine", lambda device, m=changed: m)
            assert run() == 14, part
    assert run() == 0


def test_what_is_chosen_has_been_timed_again():
    """A recipe that was lucky in the first rounds is not chosen for them."""
    int8, int4 = "int8_weight_only", "int4_weight_only"
    luck = 12

    def clock(trial):
        nonlocal luck
        if trial.fqn or trial.name != int8:
            return {int4: 0.008, "after": 0.02}.get(trial.name, 0.01)
        luck -= 1
        return 0.005 if luck >= 0 else 0.009

    model = nn.Sequential(nn.Linear(128, 8))
    result = autoquant(
        model, torch.ones(2, 128), candidates=[int8, int4], rounds=10, max_loss=math.inf,
        cache=False, timer=clock,
    )  # fmt: skip
    assert luck < 0
    assert result.wholes[result.picked].name == int4


def test_the_processor_is_named_without_procfs(monkeypatch):
    class Missing:
        def __init__(self, *args):
            pass

        def read_text(self, **kwargs):
            raise FileNotFoundError

    monkeypatch.setattr(caching, "Path", Missing)
    assert caching._processor()
