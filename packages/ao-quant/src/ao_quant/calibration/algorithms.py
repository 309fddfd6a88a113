"""Static scales of activations as algorithms: `quantize_(model, config, data=batches)` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ao_core import Algorithm, Skip, Solved, Target
from ao_core.ext import registry
from ao_core.ext.calibration import State, Statistic, Statistics
from ao_quant.calibration.histogram import Histogram
from ao_quant.calibration.judging import ROWS, settled, warn_of_outliers
from ao_quant.calibration.observers import OBSERVERS, Observed, Range, merged, observe
from ao_quant.calibration.result import found_qparams
from ao_quant.calibration.steps import ready
from ao_quant.configs import CALIBRATED, StaticConfig

__all__ = ["ALGORITHMS", "observed"]

_KEYS = ("act_range", "act_count")
_HISTOGRAM = ("act_counts", "act_top")


@cache
def observed(observer: str) -> Statistic:
    """What an observer keeps of activations, as a statistic."""
    start = OBSERVERS[observer].start
    keys = _KEYS if start().histogram is None else (*_KEYS, *_HISTOGRAM)
    return Statistic(
        f"observed({observer})",
        keys,
        lambda rows, before: _tensors(observe(start(), rows)),
        lambda a, b: _tensors(merged(_observed(a), _observed(b))),
    )


def _tensors(state: Observed) -> State:
    def of(value: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device="cpu")

    found = {
        "act_range": of(state.range, torch.float64),
        "act_count": of(state.count, torch.int64),
    }
    if state.histogram is not None:
        found["act_counts"] = state.histogram.counts
        found["act_top"] = of(state.histogram.top, torch.int64)
    return found


def _observed(values: Mapping[str, Tensor]) -> Observed:
    histogram = None
    if "act_counts" in values:
        histogram = Histogram(values["act_counts"], int(values["act_top"]))
    low, high = values["act_range"].tolist()
    return Observed(Range(low, high), int(values["act_count"]), histogram)


def _needs(config: StaticConfig) -> tuple[Statistic, ...]:
    return (observed(config.observer), *ROWS) if config.act_scale is None else ()


def _refuses(weight: Tensor, config: StaticConfig, target: Target) -> str | None:
    transform = registry.transform_for(type(config))
    new = transform.apply(weight, ready(config), target)
    return new.reason if isinstance(new, Skip) else None


def _solve(
    weight: Tensor, statistics: tuple[Statistics, ...], config: StaticConfig, target: Target
) -> Solved:
    (only,) = statistics
    scaled = config.calibrated(*found_qparams(config, _observed(only.values)))
    chosen, reason = settled(weight, only.values, scaled, target)
    return Solved(config=chosen, reason=reason)


def _after(found: dict[str, Solved]) -> None:
    warn_of_outliers({name: each.config for name, each in found.items() if each.reason})


ALGORITHMS: tuple[Algorithm, ...] = tuple(
    Algorithm(name, cls, _needs, _solve, sequential=False, refuses=_refuses, after=_after)
    for name, cls in CALIBRATED.items()
)
