"""The configurations of ao-quant: what `quantize_` is asked to do, as frozen, checked data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.registry import registry
from ao_core.weights import GroupSize

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

#: the values of every `group_size`
GROUP_SIZES: tuple[GroupSize, ...] = (32, 64, 128, 256, "row")

_FLOAT8 = ("e4m3", "e5m2")
_YES_NO = (True, False)


def _one_of(config: Config, parameter: str, allowed: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless a field has one of the allowed values, of the same type."""
    value = getattr(config, parameter)
    # 64.0 and True equal integers, but would read back as something else from a file
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{parameter}={value!r} in {type(config).__name__}: use one of {choices}")


@dataclass(frozen=True)
class _ScaledConfig(Config):
    """What configurations of affine formats share: how scales and zero points are chosen."""

    #: name of a `ScaleMethod`: "absmax", "mse", "hqq" or a plugin's
    scales: str = field(default="absmax", kw_only=True)

    def check(self) -> None:
        """Raise `UnknownNameError` for a way to choose scales that nobody registered."""
        registry.scales.get(self.scales)


@dataclass(frozen=True)
class Int8WeightOnlyConfig(_ScaledConfig):
    """Weights in symmetric int8: 1 byte a weight and a scale a row; activations as they are."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        _one_of(self, "group_size", GROUP_SIZES)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(_ScaledConfig):
    """Weights in 4 bits, two a byte, with a bfloat16 scale a group; activations as they are.

    Asymmetric by default, with a uint8 zero point a group: at 4 bits the quality is worth the byte.
    Symmetric is that much smaller, and a kernel has no zero points to subtract.
    """

    #: one of `GROUP_SIZES`; smaller is more accurate and larger in memory
    group_size: GroupSize = 128
    #: True: int4 around 0; False: uint4 with a zero point a group
    symmetric: bool = False

    def __post_init__(self) -> None:
        _one_of(self, "group_size", GROUP_SIZES)
        _one_of(self, "symmetric", _YES_NO)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(_ScaledConfig):
    """Weights in integers of 1 to 8 bits, packed without gaps, with a bfloat16 scale a group."""

    #: 1 to 8
    bits: int = 6
    #: one of `GROUP_SIZES`
    group_size: GroupSize = 128
    #: True: intN around 0, from 2 bits on; False: uintN with a zero point a group
    symmetric: bool = False

    def __post_init__(self) -> None:
        _one_of(self, "bits", tuple(range(1, 9)))
        _one_of(self, "group_size", GROUP_SIZES)
        _one_of(self, "symmetric", _YES_NO)
        if self.bits == 1 and self.symmetric:
            raise ConfigError(
                "symmetric=True in IntxWeightOnlyConfig with bits=1: the values are -1 and 0, so "
                "no positive weight could be held; use symmetric=False or bits=2"
            )


@dataclass(frozen=True)
class NF4WeightOnlyConfig(Config):
    """Weights in the 16 values of NF4, quantiles of the normal distribution, in groups of 64.

    The format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314). A scale is float32, 4.5 bits a
    weight in all, or, with `double_quant`, float8 e4m3 with one float32 scale for all of them:
    4.125 bits. (The paper gives each 256 scales, less their mean, a float32 scale: 4.127 bits.)
    """

    #: True: quantize the scales too
    double_quant: bool = True

    def __post_init__(self) -> None:
        _one_of(self, "double_quant", _YES_NO)


@dataclass(frozen=True)
class Float8WeightOnlyConfig(Config):
    """Weights in 8-bit floating point; activations as they are."""

    #: "e4m3" (3 bits of mantissa) or "e5m2" (2 bits, more range)
    dtype: str = "e4m3"
    #: what shares a scale: "row", "tensor" (each expert's matrix by itself) or "group"
    granularity: str = "row"
    #: weights in a group along the input dimension; only where granularity is "group"
    group_size: int = 128

    def __post_init__(self) -> None:
        _one_of(self, "dtype", _FLOAT8)
        _one_of(self, "granularity", ("row", "tensor", "group"))
        _one_of(self, "group_size", GROUP_SIZES[:-1])


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(Config):
    """Weights in symmetric int8 per row; activations in int8 per token, scaled at each call."""

    #: False: activations have a zero point too, for inputs that are not centred, e.g. after GELU
    symmetric_activations: bool = True

    def __post_init__(self) -> None:
        _one_of(self, "symmetric_activations", _YES_NO)


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(Config):
    """Weights and activations in float8 e4m3, the activations scaled at each call."""

    #: "row": a scale a row of the weight and a token; "tensor": one scale for each of the two
    granularity: str = "row"

    def __post_init__(self) -> None:
        _one_of(self, "granularity", ("row", "tensor"))


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(Config):
    """Weights in symmetric int4, in groups; activations in int8 with a zero point a token."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 32

    def __post_init__(self) -> None:
        _one_of(self, "group_size", GROUP_SIZES)


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
