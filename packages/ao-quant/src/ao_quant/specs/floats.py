"""Formats of floating-point numbers of 8 bits and less, and of NF4."""

from __future__ import annotations

from ao_core.spec import Spec
from ao_core.weights import WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import ROW, TENSOR, format_of

__all__: list[str] = []


@format_of.register
def _(config: c.NF4WeightOnlyConfig) -> WeightFormat:
    # float8 keeps the scales of small rows, which steps of an integer would round to 0; with that
    # range one scale of scales is enough, so that rows can be cut and joined freely
    scale = Spec("f8e4m3", TENSOR) if config.double_quant else "float32"
    return WeightFormat("nf4", 64, scale)


@format_of.register
def _(config: c.Float8WeightOnlyConfig) -> WeightFormat:
    if config.granularity == "group":
        return WeightFormat(f"f8{config.dtype}", config.group_size, "bfloat16")
    return WeightFormat(f"f8{config.dtype}", config.granularity, "float32")


@format_of.register
def _(config: c.Float8DynamicActivationFloat8WeightConfig) -> WeightFormat:
    block = ROW if config.granularity == "row" else TENSOR
    return WeightFormat("f8e4m3", config.granularity, "float32", act=Spec("f8e4m3", block))
