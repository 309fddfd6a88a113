"""Formats of integers."""

from __future__ import annotations

from dataclasses import replace

from ao_core.spec import ROW, TENSOR, Spec
from ao_core.weights import GroupSize, WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import format_of

__all__: list[str] = []

#: activations with one scale and one zero point per token
_ASYMMETRIC = Spec("uint8", ROW, zero_point="int")


def _int(
    bits: int,
    group: GroupSize,
    symmetric: bool,
    act: Spec | None = None,
    rows: int = 1,
    scale_method: str = "absmax",
    zero_point: str = "int",
) -> WeightFormat:
    # next to few bits or in small groups, a scale of 4 bytes would weigh more than it is worth
    scale = "own" if bits == 8 and isinstance(group, str) else "bfloat16"
    name, zero_point = (f"int{bits}", "none") if symmetric else (f"uint{bits}", zero_point)
    return WeightFormat(name, group, scale, zero_point, act, rows, scale_method=scale_method)


@format_of.register
def _(config: c.Int8WeightOnlyConfig) -> WeightFormat:
    return _int(8, config.group_size, symmetric=True, scale_method=config.scale_method)


@format_of.register
def _(config: c.Int4WeightOnlyConfig) -> WeightFormat:
    return _int(
        4,
        config.group_size,
        config.symmetric,
        scale_method=config.scale_method,
        zero_point=config.zero_point,
    )


@format_of.register
def _(config: c.IntxWeightOnlyConfig) -> WeightFormat:
    group, rows = config.group_size, config.block_rows
    return _int(
        config.bits,
        group,
        config.symmetric,
        rows=rows,
        scale_method=config.scale_method,
        zero_point=config.zero_point,
    )


@format_of.register
def _(config: c.UIntxWeightOnlyConfig) -> WeightFormat:
    symmetric, zero_point = False, config.zero_point
    return _int(
        config.bits,
        config.group_size,
        symmetric,
        scale_method=config.scale_method,
        zero_point=zero_point,
    )


@format_of.register
def _(config: c.BitNetWeightOnlyConfig) -> WeightFormat:
    packing = "packed" if config.trits_per_byte == 4 else "digits"
    absmean = (("scale_rule", "absmean"),)
    return WeightFormat("ternary", config.group_size, "bfloat16", packing=packing, options=absmean)


@format_of.register
def _(config: c.Int8DynamicActivationInt8WeightConfig) -> WeightFormat:
    act = Spec("int8", ROW) if config.symmetric_activations else _ASYMMETRIC
    if config.granularity == "tensor":
        act = replace(act, block=TENSOR)
    return _int(8, config.granularity, symmetric=True, act=act)


@format_of.register
def _(config: c.Int8DynamicActivationInt4WeightConfig) -> WeightFormat:
    return _int(4, config.group_size, symmetric=True, act=_ASYMMETRIC)


@format_of.register
def _(config: c.Int8DynamicActivationIntxWeightConfig) -> WeightFormat:
    bits, group, scale_method = config.bits, config.group_size, config.scale_method
    return _int(bits, group, config.symmetric, act=_ASYMMETRIC, scale_method=scale_method)


@format_of.register
def _(config: c.Float8DynamicActivationInt4WeightConfig) -> WeightFormat:
    act = Spec("f8e4m3", ROW)
    return _int(4, config.group_size, symmetric=True, act=act, scale_method=config.scale_method)
