"""Configurations: what to quantize to, as frozen dataclasses that `quantize_` takes.

Each has a short lowercase name too, which is also the name of its recipe.
"""

from __future__ import annotations

from ao_core.config import Config
from ao_quant.configs.base import GROUP_SIZES
from ao_quant.configs.floats import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    NF4WeightOnlyConfig,
)
from ao_quant.configs.ints import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
)

__all__ = [
    "CONFIGS",
    "GROUP_SIZES",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "NF4WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight",
    "float8_weight_only",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
    "intx_weight_only",
    "nf4_weight_only",
]

int8_weight_only = Int8WeightOnlyConfig
int4_weight_only = Int4WeightOnlyConfig
intx_weight_only = IntxWeightOnlyConfig
nf4_weight_only = NF4WeightOnlyConfig
float8_weight_only = Float8WeightOnlyConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig

#: name, of the transform and of the recipe -> configuration
CONFIGS: dict[str, type[Config]] = {
    "int8_weight_only": Int8WeightOnlyConfig,
    "int4_weight_only": Int4WeightOnlyConfig,
    "intx_weight_only": IntxWeightOnlyConfig,
    "nf4_weight_only": NF4WeightOnlyConfig,
    "float8_weight_only": Float8WeightOnlyConfig,
    "int8_dynamic_activation_int8_weight": Int8DynamicActivationInt8WeightConfig,
    "float8_dynamic_activation_float8_weight": Float8DynamicActivationFloat8WeightConfig,
    "int8_dynamic_activation_int4_weight": Int8DynamicActivationInt4WeightConfig,
}
