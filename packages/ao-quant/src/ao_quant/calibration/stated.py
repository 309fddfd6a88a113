"""What observers keep of activations as tensors: a `Statistic`, and scales by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce

import torch
from torch import Tensor

from ao_core import Target
from ao_core.ext import is_conv
from ao_core.ext.calibration import State, Statistic, Statistics
from ao_quant.calibration.histogram import Histogram
from ao_quant.calibration.observers import OBSERVERS, Observed, Range, merged, observe, qparams
from ao_quant.configs import StaticConfig

__all__ = ["found_scales", "is_of_experts", "observed", "seen_by"]

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
        lambda a, b: _tensors(merged(seen_by(a), seen_by(b))),
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


def seen_by(values: Mapping[str, Tensor]) -> Observed:
    """The state of an observer from its tensors; nothing seen where there are none."""
    if "act_range" not in values:
        return Observed()
    histogram = None
    if "act_counts" in values:
        histogram = Histogram(values["act_counts"], int(values["act_top"]))
    low, high = values["act_range"].tolist()
    return Observed(Range(low, high), int(values["act_count"]), histogram)


def is_of_experts(target: Target) -> bool:
    """Whether a parameter holds several matrices, each with a static scale of its own."""
    weight = getattr(target.module, target.name)
    return weight.dim() == 3 and not is_conv(weight, target)


def found_scales(
    config: StaticConfig, statistics: Sequence[Statistics], *, of_experts: bool
) -> StaticConfig:
    """The configuration with scales by what was seen.

    Args:
        config: without a scale.
        statistics: of the inputs of each matrix of the weight; see `matrices`.
        of_experts: whether each matrix has its own scale, or all have one, like the groups of a convolution.
    """
    act = config.weight_format(torch.float32).spec.act
    assert act is not None
    states = [seen_by(each.values) for each in statistics]
    if not of_experts:
        states = [reduce(merged, states)]
    found = [qparams(each, OBSERVERS[config.observer], act, config.percentile) for each in states]
    scales, points = (tuple(each) for each in zip(*found, strict=True))
    if not of_experts:
        return config.calibrated(scales[0], points[0])
    return config.calibrated(scales, None if points[0] is None else points)
