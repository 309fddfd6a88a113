"""Static scales of activations as algorithms: `quantize_(model, config, data=batches)` finds them."""

from __future__ import annotations

from torch import Tensor

from ao_core import Algorithm, Skip, Solved, Target
from ao_core.ext import registry
from ao_core.ext.calibration import Statistic, Statistics
from ao_quant.calibration.judging import settled, warn_of_outliers
from ao_quant.calibration.result import needs
from ao_quant.calibration.stated import observed
from ao_quant.calibration.steps import ready
from ao_quant.configs import CALIBRATED, StaticConfig

__all__ = ["ALGORITHMS", "observed"]


def _needs(config: StaticConfig) -> tuple[Statistic, ...]:
    return needs(config) if config.act_scale is None else ()


def _refuses(weight: Tensor, config: StaticConfig, target: Target) -> str | None:
    transform = registry.transform_for(type(config))
    new = transform.apply(weight, ready(config), target)
    return new.reason if isinstance(new, Skip) else None


def _solve(
    weight: Tensor, statistics: tuple[Statistics, ...], config: StaticConfig, target: Target
) -> Solved:
    chosen, reason = settled(weight, statistics, config, target)
    return Solved(config=chosen, reason=reason)


def _after(found: dict[str, Solved]) -> None:
    warn_of_outliers({name: each.config for name, each in found.items() if each.reason})


ALGORITHMS: tuple[Algorithm, ...] = tuple(
    Algorithm(name, cls, _needs, _solve, sequential=False, refuses=_refuses, after=_after)
    for name, cls in CALIBRATED.items()
)
