"""Formats whose activations have static scales: the dynamic ones, with one scale that is given."""

from __future__ import annotations

from dataclasses import replace

from ao_core.spec import TENSOR, Spec
from ao_core.weights import WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import format_of

__all__: list[str] = []


def _static(
    dynamic: WeightFormat, config: c.StaticConfig, zero_point: int | None = None
) -> WeightFormat:
    assert dynamic.act is not None
    return _with_scale(dynamic, replace(dynamic.act, block=TENSOR, static=True), config, zero_point)


def _with_scale(
    dynamic: WeightFormat, act: Spec, config: c.StaticConfig, zero_point: int | None = None
) -> WeightFormat:
    return replace(dynamic, act=act, act_scale=config.act_scale, act_zero_point=zero_point)


@format_of.register
def _(config: c.Int8StaticActivationInt8WeightConfig) -> WeightFormat:
    dynamic = c.Int8DynamicActivationInt8WeightConfig(
        config.symmetric_activations, config.granularity
    )
    return _static(format_of(dynamic), config, config.act_zero_point)


@format_of.register
def _(config: c.Float8StaticActivationFloat8WeightConfig) -> WeightFormat:
    dynamic = c.Float8DynamicActivationFloat8WeightConfig(
        config.granularity, config.weight_dtype, config.activation_dtype
    )
    return _static(format_of(dynamic), config)


@format_of.register
def _(config: c.NVFP4StaticActivationNVFP4WeightConfig) -> WeightFormat:
    dynamic = format_of(c.NVFP4DynamicActivationNVFP4WeightConfig())
    assert dynamic.act is not None
    assert isinstance(dynamic.act.scale_dtype, Spec)
    shared = replace(dynamic.act.scale_dtype, static=True)
    return _with_scale(dynamic, replace(dynamic.act, scale_dtype=shared), config)
