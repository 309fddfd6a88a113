"""Rounding with scales and offsets that are trained: LSQ, LSQ+, and estimators that differ in their reach.

A value is s · k + β with k = round(clamp((v - β) / s)). The derivative of rounding is taken to be 1, so with
r = (v - β) / s, where r is inside the range of k:

    ∂/∂v = 1,  ∂/∂s = k - r,  ∂/∂β = 0,   and outside:   ∂/∂v = 0,  ∂/∂s = k,  ∂/∂β = 1.

(LSQ, Esser et al. 2020, arXiv:1902.08153, equations 1 to 5, without the factor 1/sqrt(N·Q) on the gradient of
the scale; LSQ+, Bhalgat et al. 2020, arXiv:2004.09576, equations 3 to 6.) s and β are taken as they will be
stored, to whose rounding the same holds. Without zero points s may be negative, as calibration chooses it
where codes reach further down than up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.autograd import signed
from ao_core.compute.fake_quantize import FakeQuantize, encoded, register_fake_quantize
from ao_core.dispatch import run
from ao_core.errors import QuantizationError
from ao_core.numerics import scale_to_float, store_qparams, store_zero, zero_to_float
from ao_core.numerics.allowed import SIGNED_SCALES
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec, blocks_of_numbers
from ao_core.tensor.qtensor import QTensor

__all__ = [
    "LEARNED_SCALE",
    "Points",
    "chosen_points",
    "learned_by",
    "off_zero",
    "points_of",
]

#: magnitudes of scales are taken to be at least this, so that nothing is divided by 0
_LEAST = 1e-9


class Points(NamedTuple):
    """What is not learned of how a weight is rounded by a learned scale."""

    #: the zero point of all blocks, in the domain of codes; None: that of the offset, or 0
    zero: float | None = None
    #: by how much the range in which values get a gradient exceeds the codes', at either end, in codes
    reach: float = 0.0


def chosen_points(values: Tensor, spec: Spec, rule: str) -> tuple[Tensor, Tensor | None]:
    """The scale, and the offset of formats with zero points, that `quantize_` would choose; float32 grids.

    Args:
        values: (N, K).
        spec: what a rule gets.
        rule: its name, for the error.

    Raises:
        QuantizationError: the format has other than one plain scale per block.
    """
    numbers = registry.dtypes.get(spec.dtype)
    if spec.scale_dtype not in SIGNED_SCALES or numbers.kind == "codebook":
        raise QuantizationError(
            f"the rule {rule!r} cannot serve {spec}: it learns one plain scale per block; use a scale_dtype "
            f"among {', '.join(SIGNED_SCALES)}, and a format that has a scale"
        )
    return points_of(encoded(values, spec))


def points_of(q: QTensor) -> tuple[Tensor, Tensor | None]:
    """Scale, and offset where there are zero points, of each block of a weight with plain scales; float32."""
    q = q.canonical()
    scale = scale_to_float(q.parts["scale"])
    if q.spec.zero_point == "none":
        return scale, None
    point = zero_to_float(q.parts["zero_point"], registry.dtypes.get(q.spec.dtype))
    return scale, -point if q.spec.zero_point == "offset" else -point * scale


def learned_by(
    values: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    spec: Spec,
    points: Points = Points(),  # noqa: B008  immutable
) -> Tensor:
    """The stored weight by a scale and an offset, to which gradients flow as the module says.

    Args:
        values: (N, K).
        scale: s, one per block.
        offset: β, one per block; None: 0, or that of `points`.
        spec: what a rule gets.
        points: what is not learned.
    """
    with torch.no_grad():
        by, zero = _stored(scale, offset, spec, points)
    made: Tensor = _Learned.apply(values, scale, offset, by, zero, spec, points)  # type: ignore[no-untyped-call]
    return made


@signed
class _Learned(torch.autograd.Function):
    """The weight by scales and zero points as they are stored; gradients as the module says."""

    @staticmethod
    def forward(
        values: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        by: Tensor,
        zero: Tensor | None,
        spec: Spec,
        points: Points,
    ) -> QTensor:
        return encoded(values, spec, scale=by, zero_point=zero)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, scale, offset, by, zero, ctx.spec, ctx.points = inputs
        ctx.learned = scale.dtype, None if offset is None else offset.dtype
        ctx.save_for_backward(values, by, zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, by, zero = ctx.saved_tensors
        spec, points = ctx.spec, ctx.points
        scale_dtype, offset_dtype = ctx.learned
        steps, point = scale_to_float(by), None
        if zero is not None:
            point = zero_to_float(zero, registry.dtypes.get(spec.dtype))
            point = point / steps if spec.zero_point == "offset" else point
        shape = tuple(values.shape)
        plain = blocks_of_numbers(spec.dtype, spec.block, zero is not None)
        call = Call("learned_gradients", plain, shape, shape, values.dtype, values.device.type)
        through, (of_scale, outside) = run(
            call, values.detach(), grad, steps, point, points.reach, plain
        )
        if offset_dtype is None and point is not None:
            # outside a value is (k - point) · s, and the point is not moved
            of_scale = of_scale - point * outside
        of_offset = None if offset_dtype is None else outside.to(offset_dtype)
        return through, of_scale.to(scale_dtype), of_offset, None, None, None, None


def _stored(
    scale: Tensor, offset: Tensor | None, spec: Spec, points: Points
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block as they are stored."""
    by, kind = off_zero(scale, spec), spec.chosen_scale_dtype
    numbers, zeros = registry.dtypes.get(spec.dtype), spec.zero_point
    if points.zero is not None:
        return store_qparams(by, torch.full_like(by, points.zero), numbers, zeros, kind)
    stored, _ = store_qparams(by, None, numbers, zeros, kind)
    if offset is None:
        return stored, None
    point = -offset.float() / scale_to_float(stored)
    return stored, store_zero(point, stored, numbers, zeros)


def off_zero(scale: Tensor, spec: Spec) -> Tensor:
    """Learned scales in float32, away from 0: positive in formats with zero points, else of either sign."""
    scale = scale.float()
    if spec.zero_point != "none":
        return scale.clamp_min(_LEAST)
    return scale.abs().clamp_min(_LEAST).copysign(scale)


def _initial(values: Tensor, spec: Spec) -> dict[str, Tensor]:
    scale, offset = chosen_points(values, spec, "learned_scale")
    made = {"scale": scale} if offset is None else {"scale": scale, "offset": offset}
    return {name: value.to(values.dtype) for name, value in made.items()}


def _apply(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    return learned_by(values, extras["scale"], extras.get("offset"), spec)


#: One learned scale per block (LSQ), and in formats with zero points a learned offset (LSQ+). The extra
#: tensors "scale" and "offset" have one element per block and start as `quantize_` chooses them. The values
#: are those of ``quantize_tensor(weight, spec, scale=scale)``. A weight beyond the range of its block gets no
#: gradient.
LEARNED_SCALE = register_fake_quantize(FakeQuantize("learned_scale", _initial, _apply))
