"""From a configuration and the shape of a weight to the `Spec` of the quantized tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from math import prod

import torch

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.spec import WHOLE, Spec
from ao_quant.configs import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    GroupSize,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    NF4WeightOnlyConfig,
)

__all__ = ["Format", "format_of", "spec_of"]

#: blocks of a weight (out, in), and of activations (tokens, in)
_ROW = (1, WHOLE)
_TENSOR = (WHOLE, WHOLE)
#: activations with a scale and a zero point a token
_ASYMMETRIC = Spec("uint8", _ROW, zero="int")
#: dtypes of a parameter that its scales can have too
_OWN = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Format:
    """What a configuration says of any weight, whatever its shape."""

    dtype: str
    bits: int
    #: a number of weights, "row" or "tensor"
    group: GroupSize
    #: as in `Spec`; "own": the dtype of the parameter
    scale_dtype: str | Spec
    zero: str = "none"
    act: Spec | None = None


def spec_of(
    config: Config, shape: tuple[int, ...], dtype: torch.dtype, *, conv: bool = False
) -> Spec:
    """The format of a weight of `shape` (..., out, in), or, with `conv`, (out, in, *kernel).

    Groups run along the last dimension; a row that they do not divide ends with a shorter one.
    Codes of less than 8 bits are packed along it. For a convolution both would follow the few
    columns of its kernel, so groups and packed codes take the filters as one stream of numbers
    instead: a row is the whole filter, and where groups do not divide the filter, they span two.

    Args:
        config: a configuration of this package.
        shape: of the weight.
        dtype: of the weight.
        conv: whether it holds the filters of a convolution.
    """
    fmt = format_of(config)
    scale = _OWN.get(dtype, "float32") if fmt.scale_dtype == "own" else fmt.scale_dtype
    layout = "plain" if fmt.bits == 8 else "packed"
    block: tuple[int, ...]
    if fmt.group == "tensor":
        block = (WHOLE,) * len(shape) if conv else _TENSOR
    elif conv and (layout == "packed" or fmt.group != "row"):
        layout, row = "flat", max(prod(shape[1:]), 1)
        block = (row if isinstance(fmt.group, str) else min(fmt.group, row),)
    elif conv:
        block = (1, *[WHOLE] * (len(shape) - 1))
    else:
        block = _ROW if isinstance(fmt.group, str) else (1, fmt.group)
    return Spec(fmt.dtype, block, scale, fmt.zero, layout, fmt.act)


@singledispatch
def format_of(config: Config) -> Format:
    """The format that a configuration describes."""
    raise ConfigError(f"config={config!r} is no configuration of ao-quant")


def _int(bits: int, group: GroupSize, symmetric: bool, act: Spec | None = None) -> Format:
    # next to few bits or in small groups, a scale of 4 bytes would weigh more than it is worth
    scale = "own" if bits == 8 and group == "row" else "bfloat16"
    name, zero = (f"int{bits}", "none") if symmetric else (f"uint{bits}", "int")
    return Format(name, bits, group, scale, zero, act)


@format_of.register
def _(config: Int8WeightOnlyConfig) -> Format:
    return _int(8, config.group_size, symmetric=True)


@format_of.register
def _(config: Int4WeightOnlyConfig) -> Format:
    return _int(4, config.group_size, config.symmetric)


@format_of.register
def _(config: IntxWeightOnlyConfig) -> Format:
    return _int(config.bits, config.group_size, config.symmetric)


@format_of.register
def _(config: NF4WeightOnlyConfig) -> Format:
    # float8 keeps the scales of small rows, which steps of an integer would round to 0; with that
    # range one scale of scales is enough, so that rows can be cut and joined freely
    scale = Spec("f8e4m3", _TENSOR) if config.double_quant else "float32"
    return Format("nf4", 4, 64, scale)


@format_of.register
def _(config: Float8WeightOnlyConfig) -> Format:
    if config.granularity == "group":
        return Format(f"f8{config.dtype}", 8, config.group_size, "bfloat16")
    return Format(f"f8{config.dtype}", 8, config.granularity, "float32")


@format_of.register
def _(config: Int8DynamicActivationInt8WeightConfig) -> Format:
    act = Spec("int8", _ROW) if config.symmetric_activations else _ASYMMETRIC
    return _int(8, "row", symmetric=True, act=act)


@format_of.register
def _(config: Float8DynamicActivationFloat8WeightConfig) -> Format:
    block = _ROW if config.granularity == "row" else _TENSOR
    return Format("f8e4m3", 8, config.granularity, "float32", act=Spec("f8e4m3", block))


@format_of.register
def _(config: Int8DynamicActivationInt4WeightConfig) -> Format:
    return _int(4, config.group_size, symmetric=True, act=_ASYMMETRIC)
