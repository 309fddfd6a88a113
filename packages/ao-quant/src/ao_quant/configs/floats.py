"""Configurations of floating-point numbers of 3 to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import (
    FLOATS,
    ConfigError,
    GroupSize,
    WeightConfig,
    WeightFormat,
    float_name,
    matrix_spec,
)
from ao_quant.configs.base import GROUP_SIZES, LAYERS, one_of

__all__ = [
    "FLOAT8",
    "FP4WeightOnlyConfig",
    "FP6LLMWeightOnlyConfig",
    "FPXWeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
]

#: the formats of 8 bits that OCP defines
FLOAT8 = ("e4m3", "e5m2")


def _floats(ebits: int, mbits: int, group: GroupSize) -> WeightFormat:
    scale = "float32" if isinstance(group, str) else "bfloat16"
    return WeightFormat(matrix_spec(float_name(ebits, mbits), group, scale))


@dataclass(frozen=True)
class Float8WeightOnlyConfig(WeightConfig):
    """Weights in 8-bit floating point; activations as they are."""

    #: "e4m3" (3 bits of mantissa) or "e5m2" (2 bits, more range)
    dtype: str = "e4m3"
    #: what shares a scale: "row", "tensor" (each expert's matrix by itself), "group" or "block", a square
    #: of rows and columns (of convolutions, which have no blocks, a group)
    granularity: str = "row"
    #: weights in a group along the input dimension, and along each side of a block
    group_size: int = 128

    def __post_init__(self) -> None:
        one_of(self, "dtype", FLOAT8)
        one_of(self, "granularity", ("row", "tensor", "group", "block"))
        one_of(self, "group_size", GROUP_SIZES[:-1])

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        numbers, size = f"f8{self.dtype}", self.group_size
        if self.granularity == "group":
            return WeightFormat(matrix_spec(numbers, size, "bfloat16"))
        if self.granularity == "block":
            return WeightFormat(matrix_spec(numbers, size, "float32", rows=size))
        return WeightFormat(matrix_spec(numbers, self.granularity, "float32"))


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(WeightConfig):
    """Weights and activations in 8-bit floating point, the activations scaled at each call."""

    weight_only: ClassVar[str] = "float8_weight_only"

    #: "row": a scale per row of the weight and per token; "tensor": one scale for each of the two; "block":
    #: one for 128 × 128 weights, and for 128 elements of a token
    granularity: str = "row"
    #: "e4m3" or "e5m2"; a GPU has no matmul of e5m2 with e5m2
    weight_dtype: str = "e4m3"
    #: "e4m3" or "e5m2"
    activation_dtype: str = "e4m3"
    #: "linear": activations of linear layers are quantized, and other weights are skipped; "all": those of
    #: convolutions and of 3-D weights of experts too
    layers: str = field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self, "layers", LAYERS)
        one_of(self, "granularity", ("row", "tensor", "block"))
        one_of(self, "weight_dtype", FLOAT8)
        one_of(self, "activation_dtype", FLOAT8)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        numbers, activations = f"f8{self.weight_dtype}", f"f8{self.activation_dtype}"
        everywhere = self.layers == "all"
        if self.granularity == "block":
            act = Spec(activations, (1, 128))
            spec = matrix_spec(numbers, 128, "float32", act=act, rows=128)
            return WeightFormat(spec, acts_everywhere=everywhere)
        act = Spec(activations, (1, WHOLE) if self.granularity == "row" else (WHOLE, WHOLE))
        spec = matrix_spec(numbers, self.granularity, "float32", act=act)
        return WeightFormat(spec, acts_everywhere=everywhere)


@dataclass(frozen=True)
class FPXWeightOnlyConfig(WeightConfig):
    """Weights in floats of 3 to 8 bits, packed without gaps: a sign, an exponent and a mantissa.

    All codes are finite, except in (4, 3) and (5, 2), which are the float8 formats of OCP. With one exponent
    bit the values are evenly spaced: integers with a sign.
    """

    #: bits of exponent, 1 to 4, and 5 with 2 of mantissa
    ebits: int = 2
    #: bits of mantissa, 1 to 6
    mbits: int = 2
    #: one of `GROUP_SIZES`
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "ebits", tuple(sorted({ebits for ebits, _ in FLOATS})))
        allowed = tuple(sorted(mbits for ebits, mbits in FLOATS if ebits == self.ebits))
        if type(self.mbits) is not int or self.mbits not in allowed:
            raise ConfigError(
                f"mbits={self.mbits!r} in FPXWeightOnlyConfig with ebits={self.ebits}: use one of "
                f"{', '.join(map(str, allowed))}, for 3 to 8 bits with the sign"
            )
        one_of(self, "group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return _floats(self.ebits, self.mbits, self.group_size)


@dataclass(frozen=True)
class FP6LLMWeightOnlyConfig(WeightConfig):
    """Weights in 6-bit floats with 3 exponent and 2 mantissa bits: FP6-LLM (arXiv:2401.14112)."""

    #: one of `GROUP_SIZES`
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return _floats(3, 2, self.group_size)


@dataclass(frozen=True)
class FP4WeightOnlyConfig(WeightConfig):
    """Weights in the 4-bit floats e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), with one bfloat16 scale per group.

    These are the values of MXFP4 and NVFP4, not those of the type that bitsandbytes calls fp4.
    """

    #: one of `GROUP_SIZES`
    group_size: GroupSize = 64

    def __post_init__(self) -> None:
        one_of(self, "group_size", GROUP_SIZES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return _floats(2, 1, self.group_size)
