"""From a configuration and the shape of a weight to the `Spec` of the quantized tensor."""

from __future__ import annotations

from functools import singledispatch

import torch

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.spec import WHOLE, Spec
from ao_core.weights import GroupSize, WeightFormat, weight_spec
from ao_quant.configs import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    NF4WeightOnlyConfig,
)

__all__ = ["format_of", "spec_of"]

#: blocks of a weight (out, in), and of activations (tokens, in)
_ROW = (1, WHOLE)
_TENSOR = (WHOLE, WHOLE)
#: activations with a scale and a zero point a token
_ASYMMETRIC = Spec("uint8", _ROW, zero="int")


def spec_of(
    config: Config, shape: tuple[int, ...], dtype: torch.dtype, *, conv: bool = False
) -> Spec:
    """The `Spec` of a weight under a configuration; see `ao_core.weights.weight_spec`."""
    return weight_spec(format_of(config), shape, dtype, conv=conv)


@singledispatch
def format_of(config: Config) -> WeightFormat:
    """The format that a configuration describes."""
    raise ConfigError(f"config={config!r} is no configuration of ao-quant")


def _int(
    bits: int, group: GroupSize, symmetric: bool, act: Spec | None = None, scales: str = "absmax"
) -> WeightFormat:
    # next to few bits or in small groups, a scale of 4 bytes would weigh more than it is worth
    scale = "own" if bits == 8 and group == "row" else "bfloat16"
    name, zero = (f"int{bits}", "none") if symmetric else (f"uint{bits}", "int")
    return WeightFormat(name, group, scale, zero, act, scales)


@format_of.register
def _(config: Int8WeightOnlyConfig) -> WeightFormat:
    return _int(8, config.group_size, symmetric=True, scales=config.scales)


@format_of.register
def _(config: Int4WeightOnlyConfig) -> WeightFormat:
    return _int(4, config.group_size, config.symmetric, scales=config.scales)


@format_of.register
def _(config: IntxWeightOnlyConfig) -> WeightFormat:
    return _int(config.bits, config.group_size, config.symmetric, scales=config.scales)


@format_of.register
def _(config: NF4WeightOnlyConfig) -> WeightFormat:
    # float8 keeps the scales of small rows, which steps of an integer would round to 0; with that
    # range one scale of scales is enough, so that rows can be cut and joined freely
    scale = Spec("f8e4m3", _TENSOR) if config.double_quant else "float32"
    return WeightFormat("nf4", 64, scale)


@format_of.register
def _(config: Float8WeightOnlyConfig) -> WeightFormat:
    if config.granularity == "group":
        return WeightFormat(f"f8{config.dtype}", config.group_size, "bfloat16")
    return WeightFormat(f"f8{config.dtype}", config.granularity, "float32")


@format_of.register
def _(config: Int8DynamicActivationInt8WeightConfig) -> WeightFormat:
    act = Spec("int8", _ROW) if config.symmetric_activations else _ASYMMETRIC
    return _int(8, "row", symmetric=True, act=act)


@format_of.register
def _(config: Float8DynamicActivationFloat8WeightConfig) -> WeightFormat:
    block = _ROW if config.granularity == "row" else _TENSOR
    return WeightFormat("f8e4m3", config.granularity, "float32", act=Spec("f8e4m3", block))


@format_of.register
def _(config: Int8DynamicActivationInt4WeightConfig) -> WeightFormat:
    return _int(4, config.group_size, symmetric=True, act=_ASYMMETRIC)
