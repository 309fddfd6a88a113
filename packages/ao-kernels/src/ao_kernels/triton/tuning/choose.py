"""Which setting serves a problem. The first decision of a process stays: settings differ in the last bits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple

import torch

from ao_core.ext import ConfigError
from ao_kernels.triton.tuning.measure import ALLOWANCE, S, Timer, measure, seconds_of
from ao_kernels.triton.tuning.store import Device, Problem, Record, Store, store_of

__all__ = ["MODES", "Case", "Decision", "Tuner", "choose", "find", "mode", "tuner_of"]

#: values of AO_TUNE: rules alone; what is kept or shipped, else rules; what is not known is measured
MODES = ("off", "cache", "on")
#: seconds that a process measures in all, before rules decide what is left
PROCESS_ALLOWANCE = 20.0
#: another setting than the rule's serves only where it takes at most this share of its time
_GAIN = 0.97

_log = logging.getLogger(__name__)
_tuners: dict[torch.device, Tuner] = {}


@dataclass(frozen=True)
class Case(Generic[S]):
    """A launch that is to be set."""

    problem: Problem
    #: of the operands; without CUDA, as in the interpreter, rules decide
    device: torch.device
    #: what serves where nothing better is known
    rule: S
    #: gives at most four, alike for all cases of a problem, among them the rules of all of these
    candidates: Callable[[], Sequence[S]]


def choose(case: Case[S], run: Callable[[S], object]) -> S:
    """The setting for a launch; one dictionary is asked once its problem is decided.

    `run` launches with a setting and leaves no trace but its result.
    """
    if case.device.type != "cuda":
        return case.rule
    tuner = _tuners.get(case.device) or tuner_of(case.device)
    return tuner.decide(case, run).or_rule(case)


def find(case: Case[S]) -> tuple[S, str]:
    """For `explain`: what would serve, and who says so (see `Decision`); decides and measures nothing."""
    if case.device.type != "cuda":
        return case.rule, "rule"
    tuner = tuner_of(case.device)
    found = tuner.decisions.get(case.problem) or tuner.look_up(case) or Decision()
    return found.or_rule(case), found.source


def mode() -> str:
    """What AO_TUNE says; "cache" where it is not set."""
    value = os.environ.get("AO_TUNE") or "cache"
    if value not in MODES:
        raise ConfigError(f"AO_TUNE={value!r} is none of {', '.join(MODES)}")
    return value


class Decision(NamedTuple):
    """How launches of a problem are set, and who says so."""

    #: None: as the rule says for each number of rows
    setting: Any = None
    #: "rule", "shipped", "cache" or "measured"
    source: str = "rule"

    def or_rule(self, case: Case[S]) -> S:
        """The setting of a case."""
        setting: S | None = self.setting
        return case.rule if setting is None else setting


class Tuner:
    """The decisions of a process for one device."""

    def __init__(
        self,
        store: Store,
        timer: Timer,
        clock: Callable[[], float] = time.monotonic,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self.decisions: dict[Problem, Decision] = {}
        self.store = store
        self._timer, self._clock, self._capturing = timer, clock, capturing
        #: seconds of measuring that are left
        self._left = PROCESS_ALLOWANCE
        self._ahead = False
        self._guard = threading.Lock()

    def decide(self, case: Case[S], run: Callable[[S], object]) -> Decision:
        """See `choose`."""
        found = self.decisions.get(case.problem)
        if found is None:
            with self._guard:  # who comes second waits, and uses the same
                found = self.decisions.get(case.problem)
                if found is None:
                    found = self.look_up(case)
                    if found is None and self._may_measure():
                        found = self._measure(case, run)
                    self.decisions[case.problem] = found = found or Decision()
        return found

    def look_up(self, case: Case[S]) -> Decision | None:
        """What was measured before, if it still is one of the candidates."""
        if mode() == "off" and not self._ahead:
            return None
        if (found := self.store.find(case.problem)) is None:
            return None
        record, source = found
        setting = _among(case.candidates(), record)
        return None if setting is None else Decision(setting, source)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Within this context all is measured that is not known, whatever AO_TUNE says.

        What the rules have decided before is decided anew.
        """
        for problem in [each for each, found in self.decisions.items() if found.source == "rule"]:
            del self.decisions[problem]
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def _may_measure(self) -> bool:
        if self._capturing():  # nothing can be waited for
            return False
        return self._ahead or (mode() == "on" and self._left > 0)

    def _measure(self, case: Case[S], run: Callable[[S], object]) -> Decision:
        # the rule's first
        settings = sorted(case.candidates(), key=lambda each: each != case.rule)
        if len(settings) < 2:
            return Decision()
        began = self._clock()
        allowance = inf if self._ahead else min(ALLOWANCE, self._left)
        found = measure(settings, run, self._timer, self._clock, allowance)
        self._left -= 0 if self._ahead else self._clock() - began
        if len(found.seconds) < 2:
            return Decision()
        best = min(found.seconds, key=found.seconds.__getitem__)
        if found.seconds[best] > _GAIN * found.seconds[0]:
            best = 0
        as_dicts = [dict(each._asdict()) for each in settings]
        mine = Record(
            str(case.problem),
            as_dicts[best],
            tuple((as_dicts[i], 1e6 * seconds) for i, seconds in found.seconds.items()),
            tuple(as_dicts[i] for i in found.untried),
            tuple(as_dicts[i] for i in found.failed),
        )
        kept = self.store.keep(case.problem, mine)
        _log.info("%s: %s", case.problem, kept)
        first = None if kept is mine else _among(settings, kept)
        if first is not None:
            return Decision(first, "cache")
        return Decision(settings[best], "measured")


def _among(settings: Sequence[S], record: Record) -> S | None:
    return next((each for each in settings if each._asdict() == record.setting), None)


def tuner_of(device: torch.device) -> Tuner:
    """That of a CUDA device, made when it is first asked for."""
    if device not in _tuners:
        import triton

        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        store = store_of(Device(name, 10 * major + minor), triton.__version__)
        _tuners.setdefault(device, Tuner(store, partial(seconds_of, device=device)))
    return _tuners[device]
