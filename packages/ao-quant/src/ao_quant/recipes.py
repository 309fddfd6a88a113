"""Named, ready configurations: each transform's default under its own name, and variants of it."""

from __future__ import annotations

from ao_core.records import Recipe
from ao_quant import configs as c

__all__ = ["RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    Recipe("int8_weight_only", c.Int8WeightOnlyConfig(), "int8 weights, a scale a row"),
    Recipe(
        "int4_weight_only",
        c.Int4WeightOnlyConfig(),
        "uint4 weights in groups of 128 with zero points, 0.523 bytes a weight",
    ),
    Recipe(
        "int4_weight_only/g32-asymmetric",
        c.Int4WeightOnlyConfig(group_size=32),
        "the most accurate of the 4-bit integers, 0.594 bytes a weight",
    ),
    Recipe(
        "int4_weight_only/g128-symmetric",
        c.Int4WeightOnlyConfig(symmetric=True),
        "int4 weights in groups of 128, 0.516 bytes a weight",
    ),
    Recipe(
        "intx_weight_only",
        c.IntxWeightOnlyConfig(),
        "6-bit weights in groups of 128 with zero points",
    ),
    Recipe(
        "intx_weight_only/2bit",
        c.IntxWeightOnlyConfig(bits=2, group_size=32),
        "2-bit weights in groups of 32 with zero points",
    ),
    Recipe(
        "intx_weight_only/3bit",
        c.IntxWeightOnlyConfig(bits=3, group_size=32),
        "3-bit weights in groups of 32 with zero points",
    ),
    Recipe(
        "nf4_weight_only",
        c.NF4WeightOnlyConfig(),
        "NF4 weights in groups of 64, scales quantized too: 4.125 bits a weight",
    ),
    Recipe("float8_weight_only", c.Float8WeightOnlyConfig(), "float8 e4m3 weights, a scale a row"),
    Recipe(
        "float8_weight_only/tensor",
        c.Float8WeightOnlyConfig(granularity="tensor"),
        "float8 e4m3 weights, one scale",
    ),
    Recipe(
        "float8_weight_only/e5m2",
        c.Float8WeightOnlyConfig(dtype="e5m2"),
        "float8 e5m2 weights, a scale a row",
    ),
    Recipe(
        "int8_dynamic_activation_int8_weight",
        c.Int8DynamicActivationInt8WeightConfig(),
        "int8 weights per row and int8 activations per token",
    ),
    Recipe(
        "int8_dynamic_activation_int8_weight/asymmetric",
        c.Int8DynamicActivationInt8WeightConfig(symmetric_activations=False),
        "the same with a zero point a token",
    ),
    Recipe(
        "float8_dynamic_activation_float8_weight",
        c.Float8DynamicActivationFloat8WeightConfig(),
        "float8 e4m3 weights per row and activations per token",
    ),
    Recipe(
        "float8_dynamic_activation_float8_weight/tensor",
        c.Float8DynamicActivationFloat8WeightConfig(granularity="tensor"),
        "float8 e4m3 weights and activations, one scale for each",
    ),
    Recipe(
        "int8_dynamic_activation_int4_weight",
        c.Int8DynamicActivationInt4WeightConfig(),
        "int4 weights in groups of 32 and int8 activations per token",
    ),
)
