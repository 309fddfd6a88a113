"""Named, ready configurations of training."""

from __future__ import annotations

from ao_core import Recipe
from ao_float8 import training as t
from ao_float8.config import PRESETS, Float8LinearConfig

__all__ = ["RECIPES"]

_SUMMARIES = {
    "tensorwise": "float8 matmuls, one scale per tensor, gradients in e5m2",
    "rowwise": "float8 e4m3 matmuls, one scale per row of either operand",
    "rowwise_with_gw_hp": "the same, with the gradient of the weight in high precision",
    "blockwise": "float8 e4m3 matmuls, a scale for 1 × 128 activations and gradients, 128 × 128 weights",
    "mxfp8": "MXFP8 matmuls: float8 e4m3 in blocks of 32, scales are powers of two",
}

RECIPES: tuple[Recipe, ...] = (
    *(
        Recipe(f"float8/{name}", Float8LinearConfig.from_recipe_name(name), _SUMMARIES[name])
        for name in PRESETS
    ),
    Recipe(
        "int8_mixed_precision_training",
        t.Int8MixedPrecisionTrainingConfig(),
        "int8 matmuls forward and backward, one scale per row",
    ),
    Recipe(
        "int8_weight_only_training",
        t.Int8WeightOnlyTrainingConfig(),
        "int8 weights that are trained, updates rounded stochastically",
    ),
    Recipe(
        "bitnet_training", t.BitNetTrainingConfig(), "ternary weights, int8 activations per token"
    ),
    Recipe("mx_training/mxfp4", t.MXTrainingConfig(), "MXFP4 matmuls, emulated"),
    Recipe("mx_training/mxfp6", t.MXTrainingConfig("e2m3", "e3m2"), "MXFP6 matmuls, emulated"),
    Recipe("nvfp4_training", t.NVFP4TrainingConfig(), "NVFP4 matmuls, emulated"),
)
