"""How long a forward pass takes, side by side: of models that generate no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ao_core.ext import ConfigError, checked
from ao_core.ext.quantizing import Progress
from ao_hf.generation.machine import PeakMemory, synchronize
from ao_hf.generation.models import Loaded
from ao_hf.generation.presets.records import Forward
from ao_hf.generation.rounds import Spread, in_rounds
from ao_hf.memory import memory_footprint

__all__ = ["MeasuredPass", "Pass", "PassSample", "measure_passes", "pass_runner"]


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        unit: what a pass makes for each of its batch, see `Forward`.
        batch: of them at once.
    """

    unit: str
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch={self.batch}: use 1 or more")

    def __str__(self) -> str:
        return f"forward pass, {self.batch} {self.unit}{'' if self.batch == 1 else 's'}"


@dataclass(frozen=True)
class PassSample:
    """One run.

    Attributes:
        seconds: of the pass.
        weights: bytes of all weights.
        resident: the most memory that the process had.
        allocated: the most that torch had on the device; None on a CPU, where torch does not count.
    """

    seconds: float
    weights: int
    resident: int
    allocated: int | None


PassRunner: TypeAlias = Callable[[Pass], PassSample]


@dataclass(frozen=True)
class MeasuredPass:
    """One contender on one workload.

    Attributes:
        contender: its name.
        workload: what was run.
        seconds: of a pass.
        rate: units per second.
        times_baseline: how many times as fast as the baseline, within a round.
        weights_bytes: of all weights.
        peak_resident: bytes, the most of all rounds.
        peak_allocated: the same of torch on the device; None on a CPU.
    """

    contender: str
    workload: Pass
    seconds: Spread
    rate: Spread
    times_baseline: Spread
    weights_bytes: int
    peak_resident: int
    peak_allocated: int | None


def pass_runner(loaded: Loaded, forward: Forward) -> PassRunner:
    """A contender in this process: a model, and what is measured of it.

    Args:
        loaded: what `ao_hf.generation.presets.random_model` made.
        forward: of its preset.
    """

    @torch.inference_mode()
    def run(workload: Pass) -> PassSample:
        model: Any = loaded.model
        inputs, peak = forward.inputs(model, workload.batch), PeakMemory(model.device)
        synchronize(model.device)
        start = time.perf_counter()
        model(**inputs)
        synchronize(model.device)
        seconds = time.perf_counter() - start
        weights = memory_footprint(model, return_buffers=False)
        return PassSample(seconds, weights, peak.resident(), peak.allocated())

    return run


@checked
def measure_passes(
    runners: Mapping[str, PassRunner],
    workloads: Sequence[Pass],
    *,
    rounds: int = 5,
    device: str = "cpu",
    progress: Progress = None,
) -> list[MeasuredPass]:
    """Run every contender on every workload, in rounds in which they take turns; see `measure`.

    Raises:
        ConfigError: there is no contender, workload or round.
    """
    found = in_rounds(
        runners, workloads, lambda w: w, rounds=rounds, device=device, progress=progress
    )
    baseline = next(iter(runners))
    return [
        _measured(name, w, samples, taken[baseline])
        for w, (taken, _) in found.items()
        for name, samples in taken.items()
    ]


def _measured(
    name: str, w: Pass, samples: Sequence[PassSample], baseline: Sequence[PassSample]
) -> MeasuredPass:
    last = samples[-1]
    return MeasuredPass(
        name,
        w,
        Spread.of([s.seconds for s in samples]),
        Spread.of([w.batch / s.seconds for s in samples]),
        Spread.of([base.seconds / s.seconds for s, base in zip(samples, baseline, strict=True)]),
        last.weights,
        max(s.resident for s in samples),
        None if last.allocated is None else max(s.allocated or 0 for s in samples),
    )
