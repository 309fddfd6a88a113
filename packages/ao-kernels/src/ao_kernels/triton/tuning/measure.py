"""How long settings take: each is tried within an allowance of time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

import torch

__all__ = ["ALLOWANCE", "Measured", "Setting", "measure", "seconds_of"]

#: seconds that the first call of a problem may take, compiling included
ALLOWANCE = 2.0
#: launches of a setting that are timed
_LAUNCHES = 10
#: passes over scratch memory before, in which the processor gets ahead of the device
_PASSES = 64
#: least bytes of that memory
_SCRATCH = 64 << 20

_log = logging.getLogger(__name__)


class Setting(Protocol):
    """A `NamedTuple` of integers."""

    def _asdict(self) -> dict[str, int]: ...


S = TypeVar("S", bound=Setting)
#: a launch → seconds that it takes on the device
Timer = Callable[[Callable[[], object]], float]


class Measured(NamedTuple):
    """Seconds of settings by their place among those that were given."""

    seconds: dict[int, float]
    untried: tuple[int, ...]
    failed: tuple[int, ...]


def measure(
    settings: Sequence[S],
    run: Callable[[S], object],
    timer: Timer,
    clock: Callable[[], float],
    allowance: float = ALLOWANCE,
) -> Measured:
    """Try settings in turn, the first in any case, and then all once more; the best time of each counts.

    No other begins where the longest so far would not fit into what is left of `allowance`, in
    seconds: compilers cannot be interrupted. What cannot be compiled, launched or timed is left out;
    where that is the first, all are.
    """
    began, longest = clock(), 0.0
    seconds: dict[int, float] = {}
    failed: list[int] = []
    for i, setting in enumerate(settings):
        before = clock()
        if i and before - began + longest > allowance:
            break
        try:
            run(setting)  # compiles it
            seconds[i] = timer(partial(run, setting))
        except Exception as error:  # whatever the compiler raises: the call is served without it
            _log.info("%s cannot be timed: %s", setting, error)
            failed.append(i)
            if i == 0:
                break
        longest = max(longest, clock() - before)
    for i, first in seconds.items() if len(seconds) > 1 else ():
        if clock() - began > 0.9 * allowance:
            break
        seconds[i] = min(first, timer(partial(run, settings[i])))
    untried = tuple(i for i in range(len(settings)) if i not in seconds and i not in failed)
    return Measured(seconds, untried, tuple(failed))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a launch on a CUDA device, which finds nothing of its operands in caches.

    Results go to memory of their own and are dropped.
    """
    with torch.cuda.device(device):
        cached = torch.cuda.get_device_properties(device).L2_cache_size
        scratch = torch.empty(max(_SCRATCH, 2 * cached), dtype=torch.uint8, device=device)
        for _ in range(_PASSES):
            scratch.zero_()
        pairs = []
        for _ in range(_LAUNCHES):
            scratch.zero_()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        pairs[-1][1].synchronize()
        milliseconds: list[float] = [start.elapsed_time(end) for start, end in pairs]
    return median(milliseconds) / 1e3
