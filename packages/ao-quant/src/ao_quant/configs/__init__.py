"""Configurations: what to quantize to, as frozen dataclasses that `quantize_` takes.

Each configuration also has a short lowercase name, the name of its recipe.
"""

from __future__ import annotations

from ao_core import Config
from ao_quant.configs.algorithms import BaseConfig, GPTQConfig, ImatrixConfig, QronosConfig
from ao_quant.configs.autoround import AutoRoundConfig
from ao_quant.configs.base import GROUP_SIZES
from ao_quant.configs.block_qat import BlockQATConfig
from ao_quant.configs.codebooks import CodebookWeightOnlyConfig, NF4WeightOnlyConfig
from ao_quant.configs.corrections import BiasCorrectionConfig
from ao_quant.configs.floats import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FP4WeightOnlyConfig,
    FP6LLMWeightOnlyConfig,
    FPXWeightOnlyConfig,
)
from ao_quant.configs.gguf import FILE_TYPES, GGUF_TYPES, GGUFWeightOnlyConfig
from ao_quant.configs.ints import (
    BitNetWeightOnlyConfig,
    Float8DynamicActivationInt4WeightConfig,
    Int4DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8DynamicActivationTernaryWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    UIntxWeightOnlyConfig,
)
from ao_quant.configs.low_rank import LowRankConfig
from ao_quant.configs.mx import (
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from ao_quant.configs.qat import LoRAQATConfig, QATConfig
from ao_quant.configs.rotations import RotateConfig
from ao_quant.configs.scaling import (
    AWQConfig,
    ClipConfig,
    EqualizeConfig,
    ScalingConfig,
    SmoothQuantConfig,
)
from ao_quant.configs.static import (
    OBSERVERS,
    Float8StaticActivationFloat8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    NVFP4StaticActivationNVFP4WeightConfig,
    StaticConfig,
)
from ao_quant.configs.trellis import TrellisWeightOnlyConfig

__all__ = [
    "CALIBRATED",
    "CONFIGS",
    "FILE_TYPES",
    "GGUF_TYPES",
    "GROUP_SIZES",
    "OBSERVERS",
    "AWQConfig",
    "AutoRoundConfig",
    "BaseConfig",
    "BiasCorrectionConfig",
    "BitNetWeightOnlyConfig",
    "BlockQATConfig",
    "ClipConfig",
    "CodebookWeightOnlyConfig",
    "EqualizeConfig",
    "FP4WeightOnlyConfig",
    "FP6LLMWeightOnlyConfig",
    "FPXWeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "GGUFWeightOnlyConfig",
    "GPTQConfig",
    "ImatrixConfig",
    "Int4DynamicActivationInt4WeightConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8DynamicActivationTernaryWeightConfig",
    "Int8StaticActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "LoRAQATConfig",
    "LowRankConfig",
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4StaticActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
    "QATConfig",
    "QronosConfig",
    "RotateConfig",
    "ScalingConfig",
    "SmoothQuantConfig",
    "StaticConfig",
    "TrellisWeightOnlyConfig",
    "UIntxWeightOnlyConfig",
    "bitnet_weight_only",
    "codebook_weight_only",
    "float8_dynamic_activation_float8_weight",
    "float8_dynamic_activation_int4_weight",
    "float8_static_activation_float8_weight",
    "float8_weight_only",
    "fp4_weight_only",
    "fp6_llm_weight_only",
    "fpx_weight_only",
    "gguf_weight_only",
    "int4_dynamic_activation_int4_weight",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_dynamic_activation_intx_weight",
    "int8_dynamic_activation_ternary_weight",
    "int8_static_activation_int8_weight",
    "int8_weight_only",
    "intx_weight_only",
    "mx_dynamic_activation_mx_weight",
    "mx_weight_only",
    "nf4_weight_only",
    "nvfp4_dynamic_activation_nvfp4_weight",
    "nvfp4_static_activation_nvfp4_weight",
    "nvfp4_weight_only",
    "trellis_weight_only",
    "uintx_weight_only",
]

int8_weight_only = Int8WeightOnlyConfig
int4_weight_only = Int4WeightOnlyConfig
intx_weight_only = IntxWeightOnlyConfig
trellis_weight_only = TrellisWeightOnlyConfig
uintx_weight_only = UIntxWeightOnlyConfig
bitnet_weight_only = BitNetWeightOnlyConfig
nf4_weight_only = NF4WeightOnlyConfig
codebook_weight_only = CodebookWeightOnlyConfig
fp4_weight_only = FP4WeightOnlyConfig
fp6_llm_weight_only = FP6LLMWeightOnlyConfig
fpx_weight_only = FPXWeightOnlyConfig
float8_weight_only = Float8WeightOnlyConfig
mx_weight_only = MXWeightOnlyConfig
nvfp4_weight_only = NVFP4WeightOnlyConfig
gguf_weight_only = GGUFWeightOnlyConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
int8_dynamic_activation_intx_weight = Int8DynamicActivationIntxWeightConfig
int8_dynamic_activation_ternary_weight = Int8DynamicActivationTernaryWeightConfig
float8_dynamic_activation_int4_weight = Float8DynamicActivationInt4WeightConfig
int4_dynamic_activation_int4_weight = Int4DynamicActivationInt4WeightConfig
int8_static_activation_int8_weight = Int8StaticActivationInt8WeightConfig
float8_static_activation_float8_weight = Float8StaticActivationFloat8WeightConfig
nvfp4_static_activation_nvfp4_weight = NVFP4StaticActivationNVFP4WeightConfig
mx_dynamic_activation_mx_weight = MXDynamicActivationMXWeightConfig
nvfp4_dynamic_activation_nvfp4_weight = NVFP4DynamicActivationNVFP4WeightConfig

#: name, of the transform and of the recipe, -> configuration
CONFIGS: dict[str, type[Config]] = {
    "int8_weight_only": Int8WeightOnlyConfig,
    "int4_weight_only": Int4WeightOnlyConfig,
    "intx_weight_only": IntxWeightOnlyConfig,
    "uintx_weight_only": UIntxWeightOnlyConfig,
    "bitnet_weight_only": BitNetWeightOnlyConfig,
    "nf4_weight_only": NF4WeightOnlyConfig,
    "codebook_weight_only": CodebookWeightOnlyConfig,
    "fp4_weight_only": FP4WeightOnlyConfig,
    "fp6_llm_weight_only": FP6LLMWeightOnlyConfig,
    "fpx_weight_only": FPXWeightOnlyConfig,
    "float8_weight_only": Float8WeightOnlyConfig,
    "mx_weight_only": MXWeightOnlyConfig,
    "nvfp4_weight_only": NVFP4WeightOnlyConfig,
    "gguf_weight_only": GGUFWeightOnlyConfig,
    "trellis_weight_only": TrellisWeightOnlyConfig,
    "int8_dynamic_activation_int8_weight": Int8DynamicActivationInt8WeightConfig,
    "float8_dynamic_activation_float8_weight": Float8DynamicActivationFloat8WeightConfig,
    "int8_dynamic_activation_int4_weight": Int8DynamicActivationInt4WeightConfig,
    "int8_dynamic_activation_intx_weight": Int8DynamicActivationIntxWeightConfig,
    "int8_dynamic_activation_ternary_weight": Int8DynamicActivationTernaryWeightConfig,
    "float8_dynamic_activation_int4_weight": Float8DynamicActivationInt4WeightConfig,
    "int4_dynamic_activation_int4_weight": Int4DynamicActivationInt4WeightConfig,
    "mx_dynamic_activation_mx_weight": MXDynamicActivationMXWeightConfig,
    "nvfp4_dynamic_activation_nvfp4_weight": NVFP4DynamicActivationNVFP4WeightConfig,
}

#: the same of those that are no recipe, because they wait for calibration
CALIBRATED: dict[str, type[StaticConfig]] = {
    "int8_static_activation_int8_weight": Int8StaticActivationInt8WeightConfig,
    "float8_static_activation_float8_weight": Float8StaticActivationFloat8WeightConfig,
    "nvfp4_static_activation_nvfp4_weight": NVFP4StaticActivationNVFP4WeightConfig,
}
