"""The records of the algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ao_core import Algorithm, Config, ModelTransform, Skip, Solved
from ao_core.ext import registry
from ao_core.ext.calibration import CROSS, HESSIAN, SQUARES, Statistic
from ao_quant.algorithms.autoround import (
    refuses_autoround,
    solve_autoround,
    solve_autoround_block,
)
from ao_quant.algorithms.bias import needs_bias, refuses_bias, solve_bias
from ao_quant.algorithms.block_qat import solve_block_qat, solve_layer_qat
from ao_quant.algorithms.low_rank_part import after_low_rank, take_out
from ao_quant.algorithms.rotating import misplaced_reason, rotate
from ao_quant.algorithms.scaling import equalize, scale_by_awq, smooth
from ao_quant.algorithms.solving import (
    refuses,
    refuses_gptq,
    solve_clip,
    solve_gptq,
    solve_imatrix,
    solve_qronos,
)
from ao_quant.configs import (
    AutoRoundConfig,
    AWQConfig,
    BiasCorrectionConfig,
    BlockQATConfig,
    ClipConfig,
    EqualizeConfig,
    GPTQConfig,
    ImatrixConfig,
    LowRankConfig,
    QronosConfig,
    RotateConfig,
    SmoothQuantConfig,
)

__all__ = ["ALGORITHMS", "MODEL_TRANSFORMS"]


def _for_head(config: Any) -> Config | None:
    """What the base has for heads, by rounding to nearest."""
    base = getattr(config.base, "base", config.base)
    return registry.transform_for(type(base)).for_head(base)


def _record(
    name: str,
    config: type[Config],
    needs: tuple[Statistic, ...],
    solve: Callable[..., Solved | Skip],
    refuses: Callable[..., str | None],
    **fields: Any,
) -> Algorithm:
    return Algorithm(
        name,
        config,
        lambda _: needs,
        solve,
        refuses=refuses,
        for_head=_for_head,
        becomes=lambda each: each.base,
        **fields,
    )


ALGORITHMS: tuple[Algorithm, ...] = (
    _record("gptq", GPTQConfig, (HESSIAN,), solve_gptq, refuses_gptq),
    _record("qronos", QronosConfig, (HESSIAN, CROSS), solve_qronos, refuses_gptq),
    _record(
        "autoround",
        AutoRoundConfig,
        (HESSIAN,),
        solve_autoround,
        refuses_autoround,
        solve_block=solve_autoround_block,
    ),
    _record(
        "block_qat",
        BlockQATConfig,
        (HESSIAN,),
        solve_layer_qat,
        refuses,
        solve_block=solve_block_qat,
    ),
    _record("imatrix", ImatrixConfig, (SQUARES,), solve_imatrix, refuses),
    Algorithm(
        "bias_correction",
        BiasCorrectionConfig,
        needs_bias,
        solve_bias,
        refuses=refuses_bias,
        for_head=_for_head,
    ),
    _record("clip", ClipConfig, (HESSIAN,), solve_clip, refuses),
)

MODEL_TRANSFORMS: tuple[ModelTransform, ...] = (
    ModelTransform("awq", AWQConfig, scale_by_awq, then=AWQConfig.then, refuses=after_low_rank),
    ModelTransform(
        "smoothquant",
        SmoothQuantConfig,
        smooth,
        then=lambda config: config.base,
        refuses=after_low_rank,
    ),
    ModelTransform("equalize", EqualizeConfig, equalize, refuses=after_low_rank),
    ModelTransform(
        "rotate",
        RotateConfig,
        rotate,
        refuses=lambda config, before: (
            misplaced_reason(config, before) or after_low_rank(config, before)
        ),
    ),
    ModelTransform(
        "low_rank",
        LowRankConfig,
        take_out,
        then=lambda config: config.base,
        refuses=after_low_rank,
    ),
)
