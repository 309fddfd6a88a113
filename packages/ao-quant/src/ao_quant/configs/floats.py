"""Configurations of floating-point numbers of 8 bits and less, and of NF4."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.config import Config
from ao_quant.configs.base import GROUP_SIZES, YES_NO, one_of

__all__ = [
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "NF4WeightOnlyConfig",
]

_FLOAT8 = ("e4m3", "e5m2")


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
        one_of(self, "double_quant", YES_NO)


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
        one_of(self, "dtype", _FLOAT8)
        one_of(self, "granularity", ("row", "tensor", "group"))
        one_of(self, "group_size", GROUP_SIZES[:-1])


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(Config):
    """Weights and activations in float8 e4m3, the activations scaled at each call."""

    #: "row": a scale a row of the weight and a token; "tensor": one scale for each of the two
    granularity: str = "row"

    def __post_init__(self) -> None:
        one_of(self, "granularity", ("row", "tensor"))
