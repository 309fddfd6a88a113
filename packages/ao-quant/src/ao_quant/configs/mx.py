"""Configurations of microscaling formats: OCP MX, blocks of 32 under powers of two, and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.config import Config
from ao_core.numerics import MX_MODES
from ao_quant.configs.base import YES_NO, one_of

__all__ = [
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
]

#: MXFP8 (two), MXFP6 (two), MXFP4 and MXINT8
_ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")


@dataclass(frozen=True)
class MXWeightOnlyConfig(Config):
    """Weights in an OCP Microscaling (MX 1.0) format: blocks of 32 share a power of two as their scale.

    MXFP8 is the element "e4m3" or "e5m2", MXFP6 "e3m2" or "e2m3", MXFP4 "e2m1", MXINT8 "int8".
    """

    #: the element: "e4m3", "e5m2", "e3m2", "e2m3", "e2m1" or "int8"
    dtype: str = "e2m1"
    #: "floor" (the rule of the specification), "ceil", "even" or "rceil"; see `choose_e8m0`. Of "e4m3" and
    #: "e5m2" "rceil" is the better one
    scaling_mode: str = "floor"

    def __post_init__(self) -> None:
        one_of(self, "dtype", _ELEMENTS)
        one_of(self, "scaling_mode", MX_MODES)


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig(Config):
    """Weights and activations in OCP Microscaling formats, the activations scaled at each call."""

    #: the element of weights, as in `MXWeightOnlyConfig`
    weight_dtype: str = "e4m3"
    #: the element of activations
    activation_dtype: str = "e4m3"
    #: of both, as in `MXWeightOnlyConfig`, but "rceil" by default, by which nothing saturates; of "e2m1" the
    #: steps are so few that "even" loses less
    scaling_mode: str = "rceil"

    def __post_init__(self) -> None:
        one_of(self, "weight_dtype", _ELEMENTS)
        one_of(self, "activation_dtype", _ELEMENTS)
        one_of(self, "scaling_mode", MX_MODES)


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig(Config):
    """Weights in 4-bit floats e2m1, in blocks of 16 with float8 e4m3 scales: 4.5 bits a weight."""

    #: True: one float32 scale for all the scales, so that they use the range of e4m3
    per_tensor_scale: bool = True

    def __post_init__(self) -> None:
        one_of(self, "per_tensor_scale", YES_NO)


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(Config):
    """Weights and activations in NVFP4, the activations scaled at each call."""

    #: of both, as in `NVFP4WeightOnlyConfig`
    per_tensor_scale: bool = True

    def __post_init__(self) -> None:
        one_of(self, "per_tensor_scale", YES_NO)
