"""Weight-only and dynamic quantization recipes for PyTorch models, built on ao-core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ao_quant.__about__ import __version__
from ao_quant.autotuning import AutoquantReport, autoquant
from ao_quant.configs import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    NF4WeightOnlyConfig,
    float8_dynamic_activation_float8_weight,
    float8_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    intx_weight_only,
    nf4_weight_only,
)
from ao_quant.planning import QuantizationPlan, plan
from ao_quant.specs import spec_of

if TYPE_CHECKING:
    from ao_core.checkpoints import plan_checkpoint, quantize_checkpoint, verify_checkpoint

__all__ = [
    "AutoquantReport",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "NF4WeightOnlyConfig",
    "QuantizationPlan",
    "__version__",
    "autoquant",
    "float8_dynamic_activation_float8_weight",
    "float8_weight_only",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
    "intx_weight_only",
    "nf4_weight_only",
    "plan",
    "plan_checkpoint",
    "quantize_checkpoint",
    "spec_of",
    "verify_checkpoint",
]

#: functions of ao-core under the name of this package; imported when first used
_FROM_CORE = ("plan_checkpoint", "quantize_checkpoint", "verify_checkpoint")


def __getattr__(name: str) -> Any:
    if name not in _FROM_CORE:
        raise AttributeError(f"module 'ao_quant' has no attribute {name!r}")
    from ao_core import checkpoints

    return getattr(checkpoints, name)
