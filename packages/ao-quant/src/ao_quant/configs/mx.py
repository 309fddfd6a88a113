"""Configurations of microscaling formats: OCP MX, blocks of 32 under powers of two, and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import WeightConfig, WeightFormat, matrix_spec
from ao_core.ext.numerics import MX_MODES
from ao_quant.configs.base import LAYERS, YES_NO, one_of

__all__ = [
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
]

#: MXFP8 (two), MXFP6 (two), MXFP4 and MXINT8, and their number formats
_NUMBERS = {
    "e4m3": "f8e4m3",
    "e5m2": "f8e5m2",
    "e3m2": "f6e3m2",
    "e2m3": "f6e2m3",
    "e2m1": "f4e2m1",
    "int8": "int8",
}
_ELEMENTS = tuple(_NUMBERS)
_MX_BLOCK, _NVFP4_BLOCK = 32, 16


def _mx(element: str, mode: str, act: Spec | None = None) -> WeightFormat:
    options = (("mx_mode", mode),)
    return WeightFormat(matrix_spec(_NUMBERS[element], _MX_BLOCK, "e8m0", act=act, options=options))


def _nvfp4_scale(per_tensor: bool) -> str | Spec:
    return Spec("f8e4m3", (WHOLE, WHOLE)) if per_tensor else "e4m3"


@dataclass(frozen=True)
class MXWeightOnlyConfig(WeightConfig):
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

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return _mx(self.dtype, self.scaling_mode)


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig(WeightConfig):
    """Weights and activations in OCP Microscaling formats, the activations scaled at each call."""

    weight_only: ClassVar[str] = "mx_weight_only"

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

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        options = (("mx_mode", self.scaling_mode),)
        act = Spec(_NUMBERS[self.activation_dtype], (1, _MX_BLOCK), "e8m0", options=options)
        return _mx(self.weight_dtype, self.scaling_mode, act)


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig(WeightConfig):
    """Weights in 4-bit floats e2m1, in blocks of 16 with float8 e4m3 scales: 4.5 bits per weight."""

    #: True: one float32 scale for all the scales, so that they use the range of e4m3
    per_tensor_scale: bool = True

    def __post_init__(self) -> None:
        one_of(self, "per_tensor_scale", YES_NO)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        scale = _nvfp4_scale(self.per_tensor_scale)
        return WeightFormat(matrix_spec("f4e2m1", _NVFP4_BLOCK, scale))


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(WeightConfig):
    """Weights and activations in NVFP4, the activations scaled at each call."""

    weight_only: ClassVar[str] = "nvfp4_weight_only"

    #: of both, as in `NVFP4WeightOnlyConfig`
    per_tensor_scale: bool = True
    #: "linear": activations of linear layers are quantized, and other weights are skipped; "all": those of
    #: 3-D weights of experts too
    layers: str = field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self, "layers", LAYERS)
        one_of(self, "per_tensor_scale", YES_NO)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        scale = _nvfp4_scale(self.per_tensor_scale)
        act = Spec("f4e2m1", (1, _NVFP4_BLOCK), scale)
        spec = matrix_spec("f4e2m1", _NVFP4_BLOCK, scale, act=act)
        return WeightFormat(spec, acts_everywhere=self.layers == "all")
