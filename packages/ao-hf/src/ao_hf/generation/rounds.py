"""Contenders that take turns in rounds, and the spread of what is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ao_core.ext import ConfigError
from ao_core.ext.quantizing import Progress, watched
from ao_hf.generation.machine import read_rate

__all__ = ["Spread", "in_rounds"]

#: a workload, which can be a key, and what one run of it gave
W = TypeVar("W")
S = TypeVar("S")


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, and the quarter and three quarters of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Interpolated linearly."""
        ranks = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
        return cls(*torch.tensor(values, dtype=torch.float64).quantile(ranks).tolist())


def in_rounds(
    runners: Mapping[str, Callable[[W], S]],
    workloads: Sequence[W],
    shortened: Callable[[W], W],
    *,
    rounds: int,
    device: str,
    progress: Progress,
) -> dict[W, tuple[dict[str, list[S]], list[float]]]:
    """Run every contender on every workload, in rounds in which they take turns.

    Args:
        runners: name -> contender.
        workloads: one after the other.
        shortened: the workload of a first run, which is not counted.
        rounds: that are counted.
        device: whose memory is read in each round, for the read rate.
        progress: as for `quantize_`.

    Returns:
        For each workload the samples of each contender, and the read rates in bytes per second, by round.

    Raises:
        ConfigError: there is no contender, workload or round.
    """
    if not runners or not workloads or rounds < 1:
        raise ConfigError(
            f"measure: {len(runners)} contenders, {len(workloads)} workloads, rounds={rounds}: use 1 or more"
        )
    jobs = [(w, number) for w in workloads for number in range(rounds)]
    names = [f"{w}, round {number + 1}" for w, number in jobs]
    found: dict[W, tuple[dict[str, list[S]], list[float]]] = {}
    for workload, number in watched(jobs, names, progress, "bench"):
        samples, rates = found.setdefault(workload, ({name: [] for name in runners}, []))
        if number == 0:
            for run in runners.values():
                run(shortened(workload))
        rates.append(read_rate(device))
        # each begins a round in turn
        order = list(runners)
        shift = number % len(order)
        for name in order[shift:] + order[:shift]:
            samples[name].append(runners[name](workload))
    return found
