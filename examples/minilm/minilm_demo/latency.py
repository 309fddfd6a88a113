"""Latency of several contenders, measured in alternate rounds of one process."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

#: samples of each contender, by its name, round by round
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Latency:
    """One contender in milliseconds, and how many times as fast as others it was."""

    median_ms: float
    p10_ms: float
    #: baseline -> median, over the rounds, of the baseline's time divided by this one's
    speedup: dict[str, float]
    rounds: int
    #: baseline -> ends of an interval that holds the true median with a probability of 95 %
    interval: dict[str, tuple[float, float]] = field(default_factory=dict)


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    min_rounds: int = 5,
    max_rounds: int = 50,
    on_round: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time every contender once a round, in an order shuffled anew, until the time is up.

    What slows the machine for a while then slows all of them. A first round is not counted.

    Args:
        contenders: name -> call to time.
        seconds: no further round begins after that many.
        min_rounds: at least so many are measured, whatever `seconds` says.
        max_rounds: at most so many.
        on_round: told the share that is done, 0 to 1.
        clock: seconds since any moment.
    """
    shuffle = random.Random(0).shuffle
    order = list(contenders)
    samples: Samples = {name: [] for name in order}
    for call in contenders.values():
        call()
    collecting, start = gc.isenabled(), clock()
    gc.disable()
    try:
        for done in range(max_rounds):
            spent = clock() - start
            if done >= min_rounds and spent >= seconds:
                break
            shuffle(order)
            for name in order:
                before = clock()
                contenders[name]()
                samples[name].append(clock() - before)
            by_time = (clock() - start) / seconds if seconds else 1.0
            least, most = (done + 1) / min_rounds, (done + 1) / max_rounds
            on_round(min(1.0, max(most, min(by_time, least))))
    finally:
        if collecting:
            gc.enable()
    return samples


def summarize(samples: Samples, baselines: Mapping[str, str]) -> dict[str, Latency]:
    """Median, 10th percentile and speed-up of each contender.

    Args:
        samples: what `interleaved` measured.
        baselines: name of a speed-up -> name of the contender it is relative to.
    """
    found = {}
    for contender, times in samples.items():
        ratios = {
            name: [b / t for b, t in zip(samples[baseline], times, strict=True)]
            for name, baseline in baselines.items()
        }
        found[contender] = Latency(
            median_ms=1e3 * median(times),
            p10_ms=1e3 * percentile(times, 10),
            speedup={name: median(each) for name, each in ratios.items()},
            rounds=len(times),
            interval={name: interval(each) for name, each in ratios.items()},
        )
    return found


def interval(ratios: list[float]) -> tuple[float, float]:
    """That of their median, by a bootstrap of rounds, always with the same draws."""
    draws = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(ratios), (2000, len(ratios)), generator=draws)
    medians = torch.tensor(ratios, dtype=torch.float64)[chosen].median(dim=1).values
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of them lie, interpolated linearly."""
    return torch.tensor(values, dtype=torch.float64).quantile(percent / 100).item()
