"""Configurations of integers: 1 to 8 bits and ternary, weight-only or with activations in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import (
    ConfigError,
    GroupSize,
    WeightConfig,
    WeightFormat,
    matrix_spec,
    own_scale_dtype,
)
from ao_quant.configs.base import GROUP_SIZES, LAYERS, YES_NO, ScaledConfig, ZeroPointConfig, one_of

__all__ = [
    "BitNetWeightOnlyConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Int4DynamicActivationInt4WeightConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8DynamicActivationTernaryWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "UIntxWeightOnlyConfig",
]


_BITS = tuple(range(1, 9))
_WITH_TENSOR = (*GROUP_SIZES, "tensor")
#: the values of `block_rows`
_ROWS = (1, 16, 32, 64, 128, 256)
#: activations with one scale per token, or one for all
_TOKEN, _ALL = (1, WHOLE), (WHOLE, WHOLE)
#: the scale of weights is their mean magnitude
_ABSMEAN = (("scale_rule", "absmean"),)
#: activations with one scale and one zero point per token
_ASYMMETRIC = Spec("uint8", _TOKEN, zero_point="int")


def _integers(
    bits: int,
    group: GroupSize,
    dtype: torch.dtype,
    zero_point: str = "none",
    *,
    act: Spec | None = None,
    rows: int = 1,
) -> Spec:
    """Integers around 0, or unsigned ones with zero points, for a weight that is in `dtype` now."""
    # next to few bits or in small groups, a scale of 4 bytes would weigh more than it is worth
    scale = own_scale_dtype(dtype) if bits == 8 and isinstance(group, str) else "bfloat16"
    name = f"int{bits}" if zero_point == "none" else f"uint{bits}"
    return matrix_spec(name, group, scale, zero_point, act=act, rows=rows)


@dataclass(frozen=True)
class Int8WeightOnlyConfig(ScaledConfig):
    """Weights in symmetric int8: 1 byte per weight and one scale per row; activations as they are."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return WeightFormat(_integers(8, self.group_size, dtype), self.scale_method)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(ZeroPointConfig):
    """Weights in 4 bits, two per byte, with one bfloat16 scale per group; activations as they are.

    Asymmetric by default, with one uint8 zero point per group: at 4 bits the quality is worth the byte.
    The symmetric format is smaller by that byte, and kernels have no zero points to subtract.
    """

    #: one of `GROUP_SIZES`; smaller is more accurate and larger in memory
    group_size: GroupSize = 128
    #: True: int4 around 0; False: uint4 with one zero point per group
    symmetric: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "group_size", GROUP_SIZES)
        one_of(self, "symmetric", YES_NO)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        zero_point = "none" if self.symmetric else self.zero_point
        spec = _integers(4, self.group_size, dtype, zero_point)
        return WeightFormat(spec, self.scale_method)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(ZeroPointConfig):
    """Weights in integers of 1 to 8 bits, packed without gaps, with one bfloat16 scale per group."""

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

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        zero_point = "none" if self.symmetric else self.zero_point
        spec = _integers(self.bits, self.group_size, dtype, zero_point, rows=self.block_rows)
        return WeightFormat(spec, self.scale_method)


def _refuse_one_bit(config: IntxWeightOnlyConfig | Int8DynamicActivationIntxWeightConfig) -> None:
    if config.bits == 1 and config.symmetric:
        raise ConfigError(
            f"symmetric=True in {type(config).__name__} with bits=1: the values are -1 and 0, so no positive "
            "weight could be held; use symmetric=False or bits=2"
        )


@dataclass(frozen=True)
class UIntxWeightOnlyConfig(ZeroPointConfig):
    """Weights in unsigned integers of 1 to 8 bits, with a zero point and one bfloat16 scale per group."""

    #: 1 to 8
    bits: int = 4
    #: one of `GROUP_SIZES`, or "tensor" (each expert's matrix by itself)
    group_size: GroupSize = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "bits", _BITS)
        one_of(self, "group_size", _WITH_TENSOR)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        spec = _integers(self.bits, self.group_size, dtype, self.zero_point)
        return WeightFormat(spec, self.scale_method)


@dataclass(frozen=True)
class BitNetWeightOnlyConfig(WeightConfig):
    """Weights in -1, 0 and 1, times their mean magnitude: BitNet b1.58.

    The format of Ma et al. 2024 (arXiv:2402.17764), for models that were trained with it. Other models
    lose most of their quality.
    """

    #: one of `GROUP_SIZES`, or "tensor" (each expert's matrix by itself), as in the paper
    group_size: GroupSize = "tensor"
    #: 4: 2 bits per weight, which kernels read; 5: 1.6 bits, the smallest (convolutions take 2 bits)
    trits_per_byte: int = 4

    def __post_init__(self) -> None:
        one_of(self, "group_size", _WITH_TENSOR)
        one_of(self, "trits_per_byte", (4, 5))

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        layout = "packed" if self.trits_per_byte == 4 else "digits"
        return WeightFormat(
            matrix_spec("ternary", self.group_size, "bfloat16", layout=layout, options=_ABSMEAN)
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(WeightConfig):
    """Weights in symmetric int8 per row; activations in int8 per token, scaled at each call."""

    weight_only: ClassVar[str] = "int8_weight_only"

    #: False: activations have a zero point too, for inputs that are not centred, e.g. after GELU
    symmetric_activations: bool = True
    #: "row": a scale per row of the weight and per token; "tensor": one scale for each of the two
    granularity: str = "row"
    #: "linear": activations of linear layers are quantized, and other weights are skipped; "all": those of
    #: convolutions and of 3-D weights of experts too
    layers: str = field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self, "symmetric_activations", YES_NO)
        one_of(self, "granularity", ("row", "tensor"))
        one_of(self, "layers", LAYERS)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        numbers, zero_point = ("int8", "none") if self.symmetric_activations else ("uint8", "int")
        block = _ALL if self.granularity == "tensor" else _TOKEN
        act = Spec(numbers, block, zero_point=zero_point)
        spec = _integers(8, self.granularity, dtype, act=act)
        return WeightFormat(spec, acts_everywhere=self.layers == "all")


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(WeightConfig):
    """Weights in symmetric int4, in groups; activations in int8 with one zero point per token."""

    weight_only: ClassVar[str] = "int4_weight_only"

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 32

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return WeightFormat(_integers(4, self.group_size, dtype, act=_ASYMMETRIC))


@dataclass(frozen=True)
class Int8DynamicActivationIntxWeightConfig(ScaledConfig):
    """Weights in integers of 1 to 8 bits, in groups; activations in int8 with one zero point per token."""

    weight_only: ClassVar[str] = "intx_weight_only"

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

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        zero_point = "none" if self.symmetric else "int"
        spec = _integers(self.bits, self.group_size, dtype, zero_point, act=_ASYMMETRIC)
        return WeightFormat(spec, self.scale_method)


@dataclass(frozen=True)
class Int8DynamicActivationTernaryWeightConfig(WeightConfig):
    """Weights in -1, 0 and 1, times their mean magnitude; activations in int8 per token: BitNet b1.58.

    The format of Ma et al. 2024 (arXiv:2402.17764, section 2), for models that were trained with it, by
    `QATConfig` or `BitNetTrainingConfig`. Other models lose most of their quality.
    """

    weight_only: ClassVar[str] = "bitnet_weight_only"

    #: one of `GROUP_SIZES`, or "tensor" (each expert's matrix by itself), as in the paper
    group_size: GroupSize = "tensor"

    def __post_init__(self) -> None:
        one_of(self, "group_size", _WITH_TENSOR)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        act = Spec("int8", _TOKEN)
        return WeightFormat(
            matrix_spec("ternary", self.group_size, "bfloat16", act=act, options=_ABSMEAN)
        )


@dataclass(frozen=True)
class Float8DynamicActivationInt4WeightConfig(ScaledConfig):
    """Weights in symmetric int4, in groups; activations in float8 e4m3 per token, scaled at each call."""

    weight_only: ClassVar[str] = "int4_weight_only"

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 128

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        act = Spec("f8e4m3", _TOKEN)
        spec = _integers(4, self.group_size, dtype, act=act)
        return WeightFormat(spec, self.scale_method)


@dataclass(frozen=True)
class Int4DynamicActivationInt4WeightConfig(ScaledConfig):
    """Weights in symmetric int4, in groups; activations in int4 per token or group, scaled at each call.

    Activations of most models have outliers that 4 bits do not hold: rotate them first, with `RotateConfig`.
    """

    weight_only: ClassVar[str] = "int4_weight_only"

    #: weights that share one scale, one of `GROUP_SIZES`
    group_size: GroupSize = 128
    #: activations that share one scale, one of `GROUP_SIZES`; "row": one per token
    activation_group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)
        one_of(self, "activation_group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        size = self.activation_group_size
        act = Spec("int4", (1, WHOLE if isinstance(size, str) else size))
        return WeightFormat(_integers(4, self.group_size, dtype, act=act), self.scale_method)
