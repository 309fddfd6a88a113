"""What a configuration makes of a weight, with scales that data has found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core import DType, Layout, QTensor, Skip, Spec, Target
from ao_core.ext import WeightConfig, quantize_values, quantize_weight, registry
from ao_core.ext.calibration import unmatrices
from ao_quant.algorithms.clipping import clipped_qparams
from ao_quant.algorithms.importance import SCALED, weighted_qparams
from ao_quant.configs import GGUFWeightOnlyConfig

__all__ = ["clipped", "nearest", "unweighable_reason", "weighed"]


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
    """The same with scales of least error weighted by `importance`, (E, K)."""
    wide = importance[:, None].expand(weight.shape)

    def choose(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
        return weighted_qparams(x, wide.reshape(x.shape), dtype, spec)

    return _encoded(weight, config, target, choose)


def clipped(
    weight: Tensor,
    config: WeightConfig,
    target: Target,
    hessians: Sequence[Tensor],
    least: float,
) -> QTensor | Skip:
    """The same with ranges of least error of the outputs, by Σ x xᵀ of each of the E matrices."""

    def choose(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
        return clipped_qparams(x, torch.stack(list(hessians)), dtype, spec, least)

    return _encoded(weight, config, target, choose)


def unweighable_reason(weight: Tensor, config: WeightConfig, target: Target) -> str | None:
    """Why scales of this format are not chosen by the importance of columns; None where they are."""
    spec = config.spec(tuple(weight.shape), weight.dtype)
    dtype, layout = registry.dtypes.get(spec.dtype), registry.layouts.get(spec.layout)
    if isinstance(config, GGUFWeightOnlyConfig):
        return "formats of GGUF have searches of their own"
    if dtype.kind not in SCALED or spec.option("scale_rule", "absmax") != "absmax":
        return f"{spec} has no scales that could be searched for"
    if type(layout).encode is not Layout.encode or type(layout).sparsify is not Layout.sparsify:
        return f"the layout {layout.name!r} encodes values in its own way"
    return None


def _stored(weight: Tensor, target: Target) -> Tensor:
    shape = getattr(target.module, target.name).shape
    return unmatrices(weight, tuple(shape), target)


def _encoded(
    weight: Tensor, config: WeightConfig, target: Target, choose: Callable[..., Any]
) -> QTensor | Skip:
    fmt = config.weight_format(weight.dtype)

    def encode(dense: Tensor, spec: Spec) -> Tensor:
        return quantize_values(
            dense,
            spec,
            scale_method=fmt.scale_method,
            act_scale=fmt.act_scale,
            act_zero_point=fmt.act_zero_point,
            choose=choose,
        )

    found: Any = quantize_weight(_stored(weight, target), fmt, target, encode)
    return found  # type: ignore[no-any-return]
