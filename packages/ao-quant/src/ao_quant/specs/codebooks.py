"""Formats of codebooks: NF4, and values that are learned."""

from __future__ import annotations

from ao_core.spec import TENSOR, Spec
from ao_core.weights import WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import format_of

__all__: list[str] = []


@format_of.register
def _(config: c.NF4WeightOnlyConfig) -> WeightFormat:
    # float8 keeps the scales of small rows, which steps of an integer would round to 0; with that
    # range one scale of scales is enough, so that rows can be cut and joined freely
    scale = Spec("f8e4m3", TENSOR) if config.double_quant else "float32"
    return WeightFormat("nf4", 64, scale)


@format_of.register
def _(config: c.CodebookWeightOnlyConfig) -> WeightFormat:
    values = "float32" if config.group_size == "tensor" else "bfloat16"
    return WeightFormat(f"codebook{config.bits}", config.group_size, values)
