"""The transforms of ao-quant: from a dense parameter to a quantized one, by its role."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ao_core.config import Config
from ao_core.records import Skip, Target, Transform
from ao_core.registry import registry
from ao_core.weights import quantize_weight
from ao_quant import configs as c
from ao_quant.configs import CALIBRATED, CONFIGS
from ao_quant.gguf.encode import encode
from ao_quant.specs import format_of

__all__ = ["TRANSFORMS", "apply"]

#: configurations of activations too -> the one that stores the same weights and leaves activations alone
_WEIGHT_ONLY = {
    "int8_dynamic_activation_int8_weight": "int8_weight_only",
    "float8_dynamic_activation_float8_weight": "float8_weight_only",
    "int8_dynamic_activation_int4_weight": "int4_weight_only",
    "int8_dynamic_activation_intx_weight": "intx_weight_only",
    "float8_dynamic_activation_int4_weight": "int4_weight_only",
    "mx_dynamic_activation_mx_weight": "mx_weight_only",
    "nvfp4_dynamic_activation_nvfp4_weight": "nvfp4_weight_only",
    "int8_static_activation_int8_weight": "int8_weight_only",
    "float8_static_activation_float8_weight": "float8_weight_only",
    "nvfp4_static_activation_nvfp4_weight": "nvfp4_weight_only",
}
#: of inputs of the suites, which are Gaussian
_ACT_SCALE = 0.03


def apply(dense: Tensor, config: Config, target: Target) -> Tensor | Skip:
    """The quantized form of a parameter, or why there is none in this format."""
    new = quantize_weight(dense, format_of(config), target)
    if not isinstance(new, Skip):
        return new
    name = _WEIGHT_ONLY[registry.transform_for(type(config)).name]
    return Skip(f"{new.reason}; {name!r} would quantize this weight")


def _apply_gguf(dense: Tensor, config: c.GGUFWeightOnlyConfig, target: Target) -> Tensor | Skip:
    """The weight in blocks of GGUF, which have encoders of their own."""
    return quantize_weight(dense, format_of(config), target, partial(encode, config.type))


def for_head(config: Config) -> Config | None:
    """What keeps 8 bits, where the format of weights has fewer: int8 with one scale per row."""
    return c.Int8WeightOnlyConfig() if _bits(config) < 8 else None


def _gguf_head(config: c.GGUFWeightOnlyConfig) -> Config | None:
    """The same in a format that a GGUF file holds."""
    return c.GGUFWeightOnlyConfig("q8_0") if _bits(config) < 8 else None


def _bits(config: Config) -> int:
    return registry.dtypes.get(format_of(config).dtype).bits


#: transforms that do more than to choose scales
_APPLY = {"gguf_weight_only": _apply_gguf}
_FOR_HEAD = {"gguf_weight_only": _gguf_head}

TRANSFORMS: tuple[Transform, ...] = (
    *(
        Transform(
            cls, name, cls.version, _APPLY.get(name, apply), for_head=_FOR_HEAD.get(name, for_head)
        )
        for name, cls in CONFIGS.items()
    ),
    *(
        Transform(
            cls, name, cls.version, apply, example=cls(act_scale=_ACT_SCALE), for_head=for_head
        )
        for name, cls in CALIBRATED.items()
    ),
)
