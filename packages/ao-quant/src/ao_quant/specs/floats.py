"""Formats of floating-point numbers of 3 to 8 bits."""

from __future__ import annotations

from ao_core.dtypes import float_name
from ao_core.spec import ROW, TENSOR, Spec
from ao_core.weights import GroupSize, WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import format_of

__all__: list[str] = []


def _float(ebits: int, mbits: int, group: GroupSize) -> WeightFormat:
    scale = "float32" if isinstance(group, str) else "bfloat16"
    return WeightFormat(float_name(ebits, mbits), group, scale)


@format_of.register
def _(config: c.FPXWeightOnlyConfig) -> WeightFormat:
    return _float(config.ebits, config.mbits, config.group_size)


@format_of.register
def _(config: c.FP6LLMWeightOnlyConfig) -> WeightFormat:
    return _float(3, 2, config.group_size)


@format_of.register
def _(config: c.FP4WeightOnlyConfig) -> WeightFormat:
    return _float(2, 1, config.group_size)


@format_of.register
def _(config: c.Float8WeightOnlyConfig) -> WeightFormat:
    name, size = f"f8{config.dtype}", config.group_size
    if config.granularity == "group":
        return WeightFormat(name, size, "bfloat16")
    if config.granularity == "block":
        return WeightFormat(name, size, "float32", rows=size)
    return WeightFormat(name, config.granularity, "float32")


@format_of.register
def _(config: c.Float8DynamicActivationFloat8WeightConfig) -> WeightFormat:
    weight, act = f"f8{config.weight_dtype}", f"f8{config.activation_dtype}"
    if config.granularity == "block":
        return WeightFormat(weight, 128, "float32", act=Spec(act, (1, 128)), rows=128)
    block = ROW if config.granularity == "row" else TENSOR
    return WeightFormat(weight, config.granularity, "float32", act=Spec(act, block))
