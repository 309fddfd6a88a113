"""What a configuration makes of a weight, with scales that data has found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import DType, Layout, QTensor, Skip, Spec, Target
from ao_core.ext import (
    WeightConfig,
    is_conv,
    quantize_values,
    quantize_weight,
    registry,
)
from ao_core.ext.calibration import unmatrices
from ao_core.ext.numerics import choose_qparams
from ao_quant.algorithms.clipping import clipped_qparams
from ao_quant.algorithms.importance import SCALED, weighted_nested, weighted_qparams
from ao_quant.configs import GGUFWeightOnlyConfig
from ao_quant.gguf.encode import WEIGHABLE
from ao_quant.gguf.encode import encode as gguf_encode

__all__ = ["clipped", "nearest", "unweighable_reason", "weighed"]

#: the least that a column counts, beside the mean of all
_LEAST = 1e-6


def nearest(weight: Tensor, config: Any, target: Target) -> QTensor | Skip:
    """Rounded to nearest, by the transform of the configuration.

    Args:
        weight: (E, N, K).
        config: of a format.
        target: the parameter; the result has its shape.
    """
    found: Any = registry.transform_for(type(config)).apply(_stored(weight, target), config, target)
    return found  # type: ignore[no-any-return]


def weighed(
    weight: Tensor, config: WeightConfig, target: Target, importance: Tensor
) -> QTensor | Skip:
    """The same with scales of least error weighted by `importance`, (E, K): Σ x² of the columns."""
    mean = importance.mean(-1, keepdim=True)
    # columns that the data never used count a little, so that their scales are those of their weights
    counts = torch.where(mean > 0, importance.clamp(min=_LEAST * mean) / mean, 1.0).float()
    wide, fmt = counts[:, None].expand(weight.shape), config.weight_format(weight.dtype)

    def encode(dense: Tensor, spec: Spec) -> QTensor:
        by = wide.reshape(dense.shape)
        if isinstance(config, GGUFWeightOnlyConfig):
            return gguf_encode(config.type, dense, spec, by)
        if isinstance(spec.scale_dtype, Spec):
            return weighted_nested(dense, by, spec)
        return quantize_values(
            dense,
            spec,
            choose=partial(_choose, by),
            act_scale=fmt.scale_for(dense),
            act_zero_point=fmt.zero_point_for(dense),
        )

    found: Any = quantize_weight(_stored(weight, target), fmt, target, encode)
    return found  # type: ignore[no-any-return]


def _choose(
    importance: Tensor, x: Tensor, dtype: DType, spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points, or learned values, of `x` in the layout's blocked shape."""
    importance = importance.reshape(x.shape)
    if dtype.kind == "codebook":
        name = spec.chosen_scale_dtype
        return choose_qparams(x, dtype, spec.block, "none", name, importance=importance)
    return weighted_qparams(x, importance, dtype, spec)


def clipped(
    weight: Tensor,
    config: WeightConfig,
    target: Target,
    hessians: Sequence[Tensor],
    least: float,
) -> QTensor | Skip:
    """The same with ranges of least error of the outputs, by Σ x xᵀ of each of the E matrices."""
    fmt, stacked = config.weight_format(weight.dtype), torch.stack(list(hessians))

    def choose(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
        return clipped_qparams(x, stacked, dtype, spec, least)

    def encode(dense: Tensor, spec: Spec) -> QTensor:
        return quantize_values(
            dense,
            spec,
            choose=choose,
            act_scale=fmt.scale_for(dense),
            act_zero_point=fmt.zero_point_for(dense),
        )

    found: Any = quantize_weight(_stored(weight, target), fmt, target, encode)
    return found  # type: ignore[no-any-return]


def unweighable_reason(weight: Tensor, config: WeightConfig, target: Target) -> str | None:
    """Why scales of this format are not chosen by the importance of columns; None where they are."""
    spec = config.spec(tuple(weight.shape), weight.dtype, conv=is_conv(weight, target))
    dtype, layout = registry.dtypes.get(spec.dtype), registry.layouts.get(spec.layout)
    if isinstance(config, GGUFWeightOnlyConfig):
        if config.type in WEIGHABLE:
            return None
        return f"the scales of {config.type} follow the greatest element of each block"
    if dtype.kind == "codebook":
        return None
    if dtype.kind not in SCALED or spec.option("scale_rule", "absmax") != "absmax":
        return f"{spec} has no scales that could be searched for"
    if type(layout).encode is not Layout.encode or type(layout).sparsify is not Layout.sparsify:
        return f"the layout {layout.name!r} encodes values in its own way"
    return None


def _stored(weight: Tensor, target: Target) -> Tensor:
    shape = getattr(target.module, target.name).shape
    return unmatrices(weight, tuple(shape), target)
