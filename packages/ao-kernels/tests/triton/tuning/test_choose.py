"""Who decides on a setting, and that the first decision stays."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch

from ao_core.ext import ConfigError
from ao_kernels.triton.tuning import choose as module
from ao_kernels.triton.tuning.choose import PROCESS_ALLOWANCE, Case, Tuner, choose, find
from ao_kernels.triton.tuning.measure import ALLOWANCE
from ao_kernels.triton.tuning.store import Problem, Record

CUDA = torch.device("cuda", 0)


class Setting(NamedTuple):
    """What can be chosen."""

    rows: int
    splits: int


RULE, TWICE, HALF, WIDE = Setting(16, 2), Setting(16, 4), Setting(16, 1), Setting(32, 2)


@dataclass
class Machine:
    """Compiles in so many seconds, runs in so many microseconds, and counts both on its clock."""

    microseconds: dict[Setting, float]
    compiling: float = 0.3
    broken: tuple[Setting, ...] = ()
    capturing: bool = False
    now: float = 0.0
    compiled: list[Setting] = field(default_factory=list)
    runs: int = 0

    def run(self, setting):
        """A launch."""
        self.runs += 1
        if setting not in self.compiled:
            self.now += self.compiling
            self.compiled.append(setting)
        if setting in self.broken:
            raise RuntimeError("out of shared memory")
        self.last = setting

    def timer(self, run):
        """Of a launch."""
        run()
        self.now += 0.002
        return self.microseconds[self.last] / 1e6

    def tuner(self, store):
        """What decides for it."""
        return Tuner(store, self.timer, lambda: self.now, lambda: self.capturing)


@pytest.fixture
def machine():
    """The second of four settings is the best."""
    return Machine({RULE: 10.0, TWICE: 8.0, HALF: 12.0, WIDE: 9.0})


@pytest.fixture
def case():
    """A problem whose rule is not the first of its candidates."""
    problem = Problem("matmul", ("int4", 128, torch.bfloat16), 4096, 1024, 16)
    return Case(problem, CUDA, RULE, lambda: (TWICE, RULE, HALF, WIDE))


@pytest.fixture
def on(monkeypatch):
    """Measuring is asked for."""
    monkeypatch.setenv("AO_TUNE", "on")


@pytest.fixture
def installed(monkeypatch):
    """Makes `choose` find a tuner for the device that there is not."""
    return lambda tuner: monkeypatch.setitem(module._tuners, CUDA, tuner)


def kept(case, setting):
    return Record(str(case.problem), dict(setting._asdict()))


@pytest.mark.usefixtures("on")
def test_the_fastest_is_measured_once_and_kept(machine, store, case, installed):
    tuner = machine.tuner(store)
    installed(tuner)
    assert choose(case, machine.run) == TWICE
    runs = machine.runs
    assert choose(case, machine.run) == TWICE
    assert machine.runs == runs
    assert find(case) == (TWICE, "measured")
    assert machine.compiled[0] == RULE  # what would serve anyway is tried first
    record, source = store.find(case.problem)
    assert (record.setting, source) == (dict(TWICE._asdict()), "cache")
    assert dict(record.tried[1][0]) == dict(TWICE._asdict())
    assert [us for _, us in record.tried] == [10.0, 8.0, 12.0, 9.0]
    # the next process finds it, and measures nothing
    later = machine.tuner(store)
    assert later.decide(case, pytest.fail) == (TWICE, "cache")


@pytest.mark.usefixtures("on")
def test_what_is_hardly_faster_does_not_replace_the_rule(machine, store, case):
    machine.microseconds[TWICE] = machine.microseconds[WIDE] = 9.8
    assert machine.tuner(store).decide(case, machine.run) == (RULE, "measured")


@pytest.mark.parametrize("value", ["off", "cache", "", None])
def test_nothing_is_measured_unless_asked_for(machine, store, case, monkeypatch, value):
    monkeypatch.delenv("AO_TUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("AO_TUNE", value)
    assert machine.tuner(store).decide(case, pytest.fail) == (None, "rule")
    store.keep(case.problem, kept(case, HALF))
    expected = (None, "rule") if value == "off" else (HALF, "cache")
    assert machine.tuner(store).decide(case, pytest.fail) == expected


def test_a_value_that_means_nothing(machine, store, case, monkeypatch):
    monkeypatch.setenv("AO_TUNE", "yes")
    with pytest.raises(ConfigError, match="AO_TUNE='yes' is none of off, cache, on"):
        machine.tuner(store).decide(case, machine.run)


@pytest.mark.usefixtures("on")
def test_the_first_decision_stays(machine, store, case, monkeypatch):
    tuner = machine.tuner(store)
    machine.capturing = True
    assert tuner.decide(case, pytest.fail) == (None, "rule")  # a CUDA graph has it now
    machine.capturing = False
    assert tuner.decide(case, pytest.fail) == (None, "rule")
    store.keep(case.problem, kept(case, WIDE))
    assert tuner.decide(case, pytest.fail) == (None, "rule")
    # but one that captures finds what is kept
    machine.capturing = True
    assert machine.tuner(store).decide(case, pytest.fail) == (WIDE, "cache")


@pytest.mark.usefixtures("on")
def test_the_rule_is_that_of_each_call(machine, store, case, installed):
    machine.capturing = True
    installed(machine.tuner(store))
    assert choose(case, pytest.fail) == RULE
    assert choose(replace(case, rule=HALF), pytest.fail) == HALF


def test_without_a_gpu_rules_decide(case, monkeypatch):
    monkeypatch.setenv("AO_TUNE", "on")
    case = replace(case, device=torch.device("cpu"))
    assert choose(case, pytest.fail) == RULE
    assert find(case) == (RULE, "rule")


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(("compiling", "tried"), [(0.1, 4), (0.6, 3), (0.9, 2), (1.2, 0), (5.0, 0)])
def test_the_first_call_is_bounded(machine, store, case, compiling, tried):
    machine.compiling = compiling
    decision = machine.tuner(store).decide(case, machine.run)
    assert machine.now <= max(ALLOWANCE, compiling + 0.01)  # what serves must be compiled anyway
    if tried:
        record, _ = store.find(case.problem)
        assert (len(record.tried), len(record.untried)) == (tried, 4 - tried)
        assert decision == (TWICE, "measured")
    else:
        # nothing was compared: the next process may, with what the compiler has kept
        assert decision == (None, "rule")
        assert store.find(case.problem) is None


@pytest.mark.usefixtures("on")
def test_a_process_is_bounded(machine, store, case):
    tuner = machine.tuner(store)
    for n in range(1, 40):
        machine.compiled.clear()
        problem = case.problem._replace(n=n)
        tuner.decide(replace(case, problem=problem), machine.run)
    assert PROCESS_ALLOWANCE <= machine.now <= PROCESS_ALLOWANCE + ALLOWANCE
    assert tuner.decisions[problem].source == "rule"


@pytest.mark.usefixtures("on")
def test_settings_that_cannot_be_launched_are_left_out(machine, store, case):
    machine.broken = (TWICE,)
    assert machine.tuner(store).decide(case, machine.run) == (WIDE, "measured")
    record, _ = store.find(case.problem)
    assert record.failed == (dict(TWICE._asdict()),)


@pytest.mark.usefixtures("on")
def test_an_error_of_what_serves_anyway_is_left_to_the_launch(machine, store, case):
    machine.broken = (RULE,)
    assert machine.tuner(store).decide(case, machine.run) == (None, "rule")
    assert machine.compiled == [RULE]


def test_what_is_kept_serves_only_if_it_is_a_candidate(machine, store, case):
    store.keep(case.problem, kept(case, Setting(999, 7)))
    assert machine.tuner(store).decide(case, pytest.fail) == (None, "rule")


def test_what_is_shipped_serves_after_what_is_kept(machine, store, case):
    store.shipped.mkdir()
    data = {
        "format": 1, "device": store.device._asdict(), "triton": "3.6.0", "kernels": "of then",
        "records": [kept(case, HALF).to_dict()],
    }  # fmt: skip
    (store.shipped / "some-gpu-sm-90.json").write_text(json.dumps(data))
    assert machine.tuner(store).decide(case, pytest.fail) == (HALF, "shipped")
    store.keep(case.problem, kept(case, WIDE))
    assert machine.tuner(store).decide(case, pytest.fail) == (WIDE, "cache")


@pytest.mark.usefixtures("on")
def test_another_process_was_first(machine, store, case):
    """Both measure at the same time; the one that ends later uses what the other has found."""
    tuner, timer = machine.tuner(store), machine.timer

    def meanwhile(run):
        store.keep(case.problem, kept(case, WIDE))
        return timer(run)

    tuner._timer = meanwhile
    assert tuner.decide(case, machine.run) == (WIDE, "cache")


@pytest.mark.usefixtures("on")
def test_threads_use_one_decision(machine, store, case):
    tuner, found = machine.tuner(store), []
    threads = [
        threading.Thread(target=lambda: found.append(tuner.decide(case, machine.run)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(TWICE, "measured")] * 8
    assert len(machine.compiled) == 4


def test_ahead(machine, store, case, monkeypatch):
    """What is asked for is measured whatever the mode, without a bound, and in place of a rule."""
    monkeypatch.setenv("AO_TUNE", "off")
    machine.compiling = 30.0
    tuner = machine.tuner(store)
    assert tuner.decide(case, pytest.fail) == (None, "rule")
    with tuner.ahead():
        assert tuner.decide(case, machine.run) == (TWICE, "measured")
        assert len(machine.compiled) == 4
    assert tuner.decide(case, pytest.fail) == (TWICE, "measured")
    assert tuner.decide(replace(case, problem=case.problem._replace(n=1)), pytest.fail) == (
        None, "rule",
    )  # fmt: skip


def test_find_decides_nothing(machine, store, case, installed):
    tuner = machine.tuner(store)
    installed(tuner)
    assert find(case) == (RULE, "rule")
    store.keep(case.problem, kept(case, HALF))
    assert find(case) == (HALF, "cache")
    assert tuner.decisions == {}
