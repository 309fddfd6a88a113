"""Timing of calls beside each other, in rounds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ao_core.ext.calibration import Replacement, replaced

__all__ = ["ENOUGH", "Timer", "Trial", "Use", "measure", "stopwatch"]

#: makes what is timed, within a context that is not: its call
Use = Callable[[], AbstractContextManager[Callable[[], Any]]]

#: rounds of layers that are not counted: compilers and caches need them
_WARMUPS = 2
#: rounds end after so many seconds, but not before so many
ENOUGH, _FEWEST = 2.0, 5
#: after so many rounds, models that take so many times as long as the fastest take part no longer
_JUDGED, _SLOW = 3, 1.3
#: seconds, and runs at most, of a whole model in a row: in use its weights are in caches as far as they fit
_ROW, _RUNS = 0.05, 20


@dataclass(frozen=True)
class Trial:
    """A layer's calls with one candidate for its weight, or a call of the whole model."""

    #: of the first layer that has these shapes; empty: the whole model
    fqn: str
    #: recipe or configuration, or "dense"
    name: str
    #: (call, how often)
    calls: tuple[tuple[Callable[[], Any], int], ...]
    device: torch.device
    #: of a whole model: parameters that it has while it is timed
    replacements: Sequence[Replacement] = ()
    #: what is timed in place of the calls
    use: Use | None = None

    @contextmanager
    def ready(self) -> Iterator[Trial]:
        """Within this context the parameters are replaced, and the trial is one of calls."""
        with replaced(self.replacements):
            if self.use is None:
                yield self
                return
            with self.use() as call:
                yield replace(self, calls=((call, 1),))

    def run(self) -> None:
        """Every call as often as the model makes it."""
        for call, count in self.calls:
            for _ in range(count):
                call()


#: seconds that one run of a trial takes
Timer = Callable[[Trial], float]


def stopwatch(trial: Trial) -> float:
    """Seconds of one run, by the wall clock; what a device has queued is waited for."""
    _wait(trial.device)
    start = time.perf_counter()
    trial.run()
    _wait(trial.device)
    return time.perf_counter() - start


def measure(
    trials: Sequence[Trial], timer: Timer, rounds: int, enough: float = ENOUGH
) -> list[float]:
    """The 10th percentile of the seconds of each trial.

    In each round every trial runs once, so that what slows the machine down for a while slows all of them
    down. Each round has another order, so that none always follows the same one, whose threads may still
    spin and whose weights fill the caches. A whole model runs once more, untimed, after its parameters were
    replaced: kernels are selected anew for each of them then, which no other run pays for. Then short ones
    run several times in a row, as in use, and the mean counts. After three rounds only those whole models go
    on that may turn out to be the fastest: within 1.3 times the least time so far.

    Args:
        trials: what is timed.
        timer: seconds of one run.
        rounds: that are counted.
        enough: seconds after which rounds end, but not before there are five.
    """
    times: list[list[float]] = [[] for _ in trials]
    left, spent = list(range(len(trials))), 0.0
    whole = not any(trial.fqn for trial in trials)
    with torch.no_grad():
        for number in range(0 if whole else -_WARMUPS, rounds):
            for which in random.Random(number).sample(left, len(left)):
                with trials[which].ready() as trial:
                    runs = _in_a_row(trial, timer) if whole else [timer(trial)]
                if number >= 0:
                    times[which].append(sum(runs) / len(runs))
                    spent += sum(runs)
            if number + 1 >= _FEWEST and spent > enough:
                break
            if whole and number + 1 == _JUDGED:
                least = min(map(min, times))
                left = [which for which in left if min(times[which]) <= _SLOW * least]
    return [sorted(seconds)[len(seconds) // 10] for seconds in times]


def _in_a_row(trial: Trial, timer: Timer) -> list[float]:
    trial.run()
    runs = [timer(trial)]
    while len(runs) < _RUNS and sum(runs) + runs[0] < _ROW:
        runs.append(timer(trial))
    return runs


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
