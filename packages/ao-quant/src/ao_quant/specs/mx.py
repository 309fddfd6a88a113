"""Formats of blocks with 8-bit scales: OCP MX and NVFP4."""

from __future__ import annotations

from ao_core.spec import TENSOR, Spec
from ao_core.weights import WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import format_of

__all__: list[str] = []

#: element of a configuration -> number format
_ELEMENTS = {
    "e4m3": "f8e4m3",
    "e5m2": "f8e5m2",
    "e3m2": "f6e3m2",
    "e2m3": "f6e2m3",
    "e2m1": "f4e2m1",
    "int8": "int8",
}
_MX_BLOCK, _NVFP4_BLOCK = 32, 16


def _mx(element: str, mode: str, act: Spec | None = None) -> WeightFormat:
    options = (("mx_mode", mode),)
    return WeightFormat(_ELEMENTS[element], _MX_BLOCK, "e8m0", act=act, options=options)


@format_of.register
def _(config: c.MXWeightOnlyConfig) -> WeightFormat:
    return _mx(config.dtype, config.scaling_mode)


@format_of.register
def _(config: c.MXDynamicActivationMXWeightConfig) -> WeightFormat:
    options = (("mx_mode", config.scaling_mode),)
    element = _ELEMENTS[config.activation_dtype]
    act = Spec(element, (1, _MX_BLOCK), "e8m0", options=options)
    return _mx(config.weight_dtype, config.scaling_mode, act)


def _nvfp4_scale(per_tensor: bool) -> str | Spec:
    return Spec("f8e4m3", TENSOR) if per_tensor else "e4m3"


@format_of.register
def _(config: c.NVFP4WeightOnlyConfig) -> WeightFormat:
    return WeightFormat("f4e2m1", _NVFP4_BLOCK, _nvfp4_scale(config.per_tensor_scale))


@format_of.register
def _(config: c.NVFP4DynamicActivationNVFP4WeightConfig) -> WeightFormat:
    scale = _nvfp4_scale(config.per_tensor_scale)
    act = Spec("f4e2m1", (1, _NVFP4_BLOCK), scale)
    return WeightFormat("f4e2m1", _NVFP4_BLOCK, scale, act=act)
