"""Configurations of integers: 1 to 8 bits, weight-only or with activations in 8 bits, and ternary."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.weights import GroupSize
from ao_quant.configs.base import GROUP_SIZES, YES_NO, one_of

__all__ = [
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
]


@dataclass(frozen=True)
class Int8WeightOnlyConfig(Config):
    """Weights in symmetric int8: 1 byte a weight and a scale a row; activations as they are."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(Config):
    """Weights in 4 bits, two a byte, with a bfloat16 scale a group; activations as they are.

    Asymmetric by default, with a uint8 zero point a group: at 4 bits the quality is worth the byte.
    Symmetric is that much smaller, and a kernel has no zero points to subtract.
    """

    #: one of `GROUP_SIZES`; smaller is more accurate and larger in memory
    group_size: GroupSize = 128
    #: True: int4 around 0; False: uint4 with a zero point a group
    symmetric: bool = False

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)
        one_of(self, "symmetric", YES_NO)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(Config):
    """Weights in integers of 1 to 8 bits, packed without gaps, with a bfloat16 scale a group."""

    #: 1 to 8
    bits: int = 6
    #: one of `GROUP_SIZES`
    group_size: GroupSize = 128
    #: True: intN around 0, from 2 bits on; False: uintN with a zero point a group
    symmetric: bool = False

    def __post_init__(self) -> None:
        one_of(self, "bits", tuple(range(1, 9)))
        one_of(self, "group_size", GROUP_SIZES)
        one_of(self, "symmetric", YES_NO)
        if self.bits == 1 and self.symmetric:
            raise ConfigError(
                "symmetric=True in IntxWeightOnlyConfig with bits=1: the values are -1 and 0, so "
                "no positive weight could be held; use symmetric=False or bits=2"
            )


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(Config):
    """Weights in symmetric int8 per row; activations in int8 per token, scaled at each call."""

    #: False: activations have a zero point too, for inputs that are not centred, e.g. after GELU
    symmetric_activations: bool = True

    def __post_init__(self) -> None:
        one_of(self, "symmetric_activations", YES_NO)


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(Config):
    """Weights in symmetric int4, in groups; activations in int8 with a zero point a token."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 32

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)
