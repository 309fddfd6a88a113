"""The records of the algorithms."""

from __future__ import annotations

from functools import partial
from typing import Any

from ao_core import Algorithm, Config
from ao_core.ext import registry
from ao_core.ext.calibration import ABS_MAX, ABS_SUMS, HESSIAN, SQUARES
from ao_quant.algorithms.solving import (
    refuses,
    refuses_gptq,
    refuses_scaling,
    solve_awq,
    solve_gptq,
    solve_imatrix,
    solve_smoothquant,
)
from ao_quant.configs.algorithms import AWQConfig, GPTQConfig, ImatrixConfig, SmoothQuantConfig

__all__ = ["ALGORITHMS"]


def _needs(statistics: tuple[Any, ...], config: Config) -> tuple[Any, ...]:
    return statistics


def _for_head(config: Any) -> Config | None:
    """What the base has for heads, by rounding to nearest."""
    return registry.transform_for(type(config.base)).for_head(config.base)


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(
        "gptq",
        GPTQConfig,
        partial(_needs, (HESSIAN,)),
        solve_gptq,
        refuses=refuses_gptq,
        for_head=_for_head,
    ),
    Algorithm(
        "imatrix",
        ImatrixConfig,
        partial(_needs, (SQUARES,)),
        solve_imatrix,
        refuses=refuses,
        for_head=_for_head,
    ),
    Algorithm(
        "awq",
        AWQConfig,
        partial(_needs, (HESSIAN, ABS_SUMS)),
        solve_awq,
        refuses=refuses_scaling,
        for_head=_for_head,
    ),
    Algorithm(
        "smoothquant",
        SmoothQuantConfig,
        partial(_needs, (ABS_MAX,)),
        solve_smoothquant,
        sequential=False,
        refuses=refuses_scaling,
        for_head=_for_head,
    ),
)
