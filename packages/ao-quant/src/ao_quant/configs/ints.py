"""Configurations of integers: 1 to 8 bits and ternary, weight-only or with activations in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.weights import GroupSize
from ao_quant.configs.base import GROUP_SIZES, YES_NO, ScaledConfig, ZeroPointConfig, one_of

__all__ = [
    "BitNetWeightOnlyConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "UIntxWeightOnlyConfig",
]


_BITS = tuple(range(1, 9))
_WITH_TENSOR = (*GROUP_SIZES, "tensor")
#: the values of `block_rows`
_ROWS = (1, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Int8WeightOnlyConfig(ScaledConfig):
    """Weights in symmetric int8: 1 byte a weight and one scale per row; activations as they are."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(ZeroPointConfig):
    """Weights in 4 bits, two a byte, with a bfloat16 scale a group; activations as they are.

    Asymmetric by default, with a uint8 zero point a group: at 4 bits the quality is worth the byte.
    Symmetric is that much smaller, and a kernel has no zero points to subtract.
    """

    #: one of `GROUP_SIZES`; smaller is more accurate and larger in memory
    group_size: GroupSize = 128
    #: True: int4 around 0; False: uint4 with one zero point per group
    symmetric: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "group_size", GROUP_SIZES)
        one_of(self, "symmetric", YES_NO)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(ZeroPointConfig):
    """Weights in integers of 1 to 8 bits, packed without gaps, with a bfloat16 scale a group."""

    #: 1 to 8
    bits: int = 6
    #: one of `GROUP_SIZES`, or "tensor" (each expert's matrix by itself)
    group_size: GroupSize = 128
    #: True: intN around 0, from 2 bits on; False: uintN with one zero point per group
    symmetric: bool = False
    #: rows that share a scale with a group, 1, 16, 32, 64, 128 or 256: a block of 128 × 128 weights is
    #: group_size=128, block_rows=128. Convolutions have groups only
    block_rows: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "bits", _BITS)
        one_of(self, "group_size", _WITH_TENSOR)
        one_of(self, "symmetric", YES_NO)
        one_of(self, "block_rows", _ROWS)
        if self.block_rows > 1 and isinstance(self.group_size, str):
            raise ConfigError(
                f"block_rows={self.block_rows} in IntxWeightOnlyConfig with "
                f"group_size={self.group_size!r}: a block has a number of columns; use block_rows=1 or "
                "group_size=128"
            )
        _refuse_one_bit(self)


def _refuse_one_bit(config: IntxWeightOnlyConfig | Int8DynamicActivationIntxWeightConfig) -> None:
    if config.bits == 1 and config.symmetric:
        raise ConfigError(
            f"symmetric=True in {type(config).__name__} with bits=1: the values are -1 and 0, so no positive "
            "weight could be held; use symmetric=False or bits=2"
        )


@dataclass(frozen=True)
class UIntxWeightOnlyConfig(ZeroPointConfig):
    """Weights in unsigned integers of 1 to 8 bits, with a zero point and a bfloat16 scale a group."""

    #: 1 to 8
    bits: int = 4
    #: one of `GROUP_SIZES`, or "tensor" (each expert's matrix by itself)
    group_size: GroupSize = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "bits", _BITS)
        one_of(self, "group_size", _WITH_TENSOR)


@dataclass(frozen=True)
class BitNetWeightOnlyConfig(Config):
    """Weights in -1, 0 and 1, times their mean magnitude: BitNet b1.58.

    The format of Ma et al. 2024 (arXiv:2402.17764), for models that were trained for it; others lose
    most of their quality.
    """

    #: one of `GROUP_SIZES`, or "tensor" (each expert's matrix by itself), as in the paper
    group_size: GroupSize = "tensor"
    #: 4: 2 bits a weight, which kernels read; 5: 1.6 bits, the smallest (convolutions take 2 bits)
    trits_per_byte: int = 4

    def __post_init__(self) -> None:
        one_of(self, "group_size", _WITH_TENSOR)
        one_of(self, "trits_per_byte", (4, 5))


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(Config):
    """Weights in symmetric int8 per row; activations in int8 per token, scaled at each call."""

    #: False: activations have a zero point too, for inputs that are not centred, e.g. after GELU
    symmetric_activations: bool = True
    #: "row": a scale per row of the weight and per token; "tensor": one scale for each of the two
    granularity: str = "row"

    def __post_init__(self) -> None:
        one_of(self, "symmetric_activations", YES_NO)
        one_of(self, "granularity", ("row", "tensor"))


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(Config):
    """Weights in symmetric int4, in groups; activations in int8 with one zero point per token."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 32

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)


@dataclass(frozen=True)
class Int8DynamicActivationIntxWeightConfig(ScaledConfig):
    """Weights in integers of 1 to 8 bits, in groups; activations in int8 with one zero point per token."""

    #: 1 to 8
    bits: int = 6
    #: one of `GROUP_SIZES`
    group_size: GroupSize = 32
    #: True: intN around 0, from 2 bits on; False: uintN with one zero point per group
    symmetric: bool = True

    def __post_init__(self) -> None:
        one_of(self, "bits", _BITS)
        one_of(self, "group_size", GROUP_SIZES)
        one_of(self, "symmetric", YES_NO)
        _refuse_one_bit(self)


@dataclass(frozen=True)
class Float8DynamicActivationInt4WeightConfig(ScaledConfig):
    """Weights in symmetric int4, in groups; activations in float8 e4m3 per token, scaled at each call."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 128

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)
