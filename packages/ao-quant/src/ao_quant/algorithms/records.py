"""The records of the algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ao_core import Algorithm, Config, Skip, Solved
from ao_core.ext import registry
from ao_core.ext.calibration import ABS_MAX, ABS_SUMS, HESSIAN, SQUARES, Statistic
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


def _for_head(config: Any) -> Config | None:
    """What the base has for heads, by rounding to nearest."""
    return registry.transform_for(type(config.base)).for_head(config.base)


def _record(
    name: str,
    config: type[Config],
    needs: tuple[Statistic, ...],
    solve: Callable[..., Solved | Skip],
    refuses: Callable[..., str | None],
    *,
    sequential: bool = True,
) -> Algorithm:
    return Algorithm(
        name,
        config,
        lambda _: needs,
        solve,
        sequential=sequential,
        refuses=refuses,
        for_head=_for_head,
        becomes=lambda each: each.base,
    )


ALGORITHMS: tuple[Algorithm, ...] = (
    _record("gptq", GPTQConfig, (HESSIAN,), solve_gptq, refuses_gptq),
    _record("imatrix", ImatrixConfig, (SQUARES,), solve_imatrix, refuses),
    _record("awq", AWQConfig, (HESSIAN, ABS_SUMS), solve_awq, refuses_scaling),
    _record(
        "smoothquant",
        SmoothQuantConfig,
        (ABS_MAX,),
        solve_smoothquant,
        refuses_scaling,
        sequential=False,
    ),
)
