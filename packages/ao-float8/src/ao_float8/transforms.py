"""The transforms of ao-float8: from a dense parameter to one that is multiplied in low precision."""

from __future__ import annotations

from torch import Tensor

from ao_core import WHOLE, ComputeWeight, Config, Skip, Spec, Target, Transform
from ao_core.ext import STOCHASTIC, matmul_unsupported_reason, quantize_values
from ao_float8.config import Float8LinearConfig
from ao_float8.specs import matmuls_of
from ao_float8.training import (
    BitNetTrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    MXTrainingConfig,
    NVFP4TrainingConfig,
)

__all__ = ["TRANSFORMS"]

_INT8_MASTER = Spec("int8", (1, WHOLE), options=(STOCHASTIC,))


def _compute(weight: Tensor, config: Config, target: Target) -> Tensor | Skip:
    if reason := matmul_unsupported_reason(weight, target):
        return Skip(reason)
    return ComputeWeight(weight, *matmuls_of(config))


def _float8(weight: Tensor, config: Float8LinearConfig, target: Target) -> Tensor | Skip:
    if config.min_mean_dim and weight.dim() in (2, 3):
        rows, columns = weight.shape[-2:]
        mean = 2 * rows * columns / max(rows + columns, 1)
        if mean < config.min_mean_dim:
            return Skip(
                f"too small to gain: its mean size {mean:.0f} is below min_mean_dim={config.min_mean_dim}; "
                "min_mean_dim=0 converts every layer",
                kept=True,
            )
    return _compute(weight, config, target)


def _int8_master(weight: Tensor, config: Config, target: Target) -> Tensor | Skip:
    reason = matmul_unsupported_reason(weight, target)
    return Skip(reason) if reason else quantize_values(weight, _INT8_MASTER)


TRANSFORMS: tuple[Transform, ...] = (
    Transform(Float8LinearConfig, "float8_training", 1, _float8, needs_values=False),
    Transform(
        Int8MixedPrecisionTrainingConfig,
        "int8_mixed_precision_training",
        1,
        _compute,
        needs_values=False,
    ),
    Transform(Int8WeightOnlyTrainingConfig, "int8_weight_only_training", 1, _int8_master),
    Transform(BitNetTrainingConfig, "bitnet_training", 1, _compute, needs_values=False),
    Transform(MXTrainingConfig, "mx_training", 1, _compute, needs_values=False),
    Transform(NVFP4TrainingConfig, "nvfp4_training", 1, _compute, needs_values=False),
)
