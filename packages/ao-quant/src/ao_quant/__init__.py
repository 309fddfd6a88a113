"""Weight-only, dynamic and static quantization of PyTorch models, built on ao-core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ao_quant.__about__ import __version__
from ao_quant.configs import (
    BitNetWeightOnlyConfig,
    CodebookWeightOnlyConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FP4WeightOnlyConfig,
    FP6LLMWeightOnlyConfig,
    FPXWeightOnlyConfig,
    GGUFWeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NF4WeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4StaticActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    UIntxWeightOnlyConfig,
    bitnet_weight_only,
    codebook_weight_only,
    float8_dynamic_activation_float8_weight,
    float8_dynamic_activation_int4_weight,
    float8_static_activation_float8_weight,
    float8_weight_only,
    fp4_weight_only,
    fp6_llm_weight_only,
    fpx_weight_only,
    gguf_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_dynamic_activation_intx_weight,
    int8_static_activation_int8_weight,
    int8_weight_only,
    intx_weight_only,
    mx_dynamic_activation_mx_weight,
    mx_weight_only,
    nf4_weight_only,
    nvfp4_dynamic_activation_nvfp4_weight,
    nvfp4_static_activation_nvfp4_weight,
    nvfp4_weight_only,
    uintx_weight_only,
)

if TYPE_CHECKING:
    from ao_core import plan_checkpoint, quantize_checkpoint, verify_checkpoint
    from ao_quant.autotuning import AutoquantReport, OneRowWarning, autoquant
    from ao_quant.calibration import (
        Calibration,
        OutlierWarning,
        calibrate,
        convert,
        discard,
        prepare,
    )
    from ao_quant.planning import QuantizationPlan, plan

__all__ = [
    "AutoquantReport",
    "BitNetWeightOnlyConfig",
    "Calibration",
    "CodebookWeightOnlyConfig",
    "FP4WeightOnlyConfig",
    "FP6LLMWeightOnlyConfig",
    "FPXWeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "GGUFWeightOnlyConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8StaticActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4StaticActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
    "OneRowWarning",
    "OutlierWarning",
    "QuantizationPlan",
    "UIntxWeightOnlyConfig",
    "__version__",
    "autoquant",
    "bitnet_weight_only",
    "calibrate",
    "codebook_weight_only",
    "convert",
    "discard",
    "float8_dynamic_activation_float8_weight",
    "float8_dynamic_activation_int4_weight",
    "float8_static_activation_float8_weight",
    "float8_weight_only",
    "fp4_weight_only",
    "fp6_llm_weight_only",
    "fpx_weight_only",
    "gguf_weight_only",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_dynamic_activation_intx_weight",
    "int8_static_activation_int8_weight",
    "int8_weight_only",
    "intx_weight_only",
    "mx_dynamic_activation_mx_weight",
    "mx_weight_only",
    "nf4_weight_only",
    "nvfp4_dynamic_activation_nvfp4_weight",
    "nvfp4_static_activation_nvfp4_weight",
    "nvfp4_weight_only",
    "plan",
    "plan_checkpoint",
    "prepare",
    "quantize_checkpoint",
    "uintx_weight_only",
    "verify_checkpoint",
]

#: public name -> module that defines it, of those that are imported when first used: what only finds and
#: applies the configurations, as loading of plugins does, needs none of them
_MODULES = {
    "AutoquantReport": "ao_quant.autotuning",
    "Calibration": "ao_quant.calibration",
    "OneRowWarning": "ao_quant.autotuning",
    "OutlierWarning": "ao_quant.calibration",
    "QuantizationPlan": "ao_quant.planning",
    "autoquant": "ao_quant.autotuning",
    "calibrate": "ao_quant.calibration",
    "convert": "ao_quant.calibration",
    "discard": "ao_quant.calibration",
    "plan": "ao_quant.planning",
    "plan_checkpoint": "ao_core",
    "prepare": "ao_quant.calibration",
    "quantize_checkpoint": "ao_core",
    "verify_checkpoint": "ao_core",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'ao_quant' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
