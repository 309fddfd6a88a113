"""From a dense tensor to a `QTensor`: choose scales, encode, pack."""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ao_core.arguments import checked, shown
from ao_core.errors import AoError, ConfigError, QuantizationError
from ao_core.guarded import attempt, owner
from ao_core.numerics import grid_shape
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, Spec
from ao_core.tensor.activations import check_act, make_act_parts
from ao_core.tensor.checks import check_finite, check_quantizable
from ao_core.tensor.encoding import Chooser, encode_parts
from ao_core.tensor.input_steps import make_step_parts, step_weight, stored_spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.sharding import is_sharded

__all__ = [
    "quantize_tensor",
    "quantize_values",
]

#: kinds of number formats whose values a scale multiplies
_SCALED = ("int", "float", "lut")


@checked
def quantize_tensor(
    x: Tensor,
    spec: Spec,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    scale_method: str = "absmax",
    act_scale: float | Tensor | None = None,
    act_zero_point: float | Tensor | None = None,
    in_perm: Tensor | None = None,
    in_scale: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> QTensor:
    """Quantize a dense tensor.

    Where `spec.input` has steps, x is the logical weight, and what is stored is W S⁻¹; see `ao_core.steps`.

    Args:
        x: floating-point tensor of any shape with at least one dimension.
        spec: the format.
        scale: one value per block, of the weight after the input steps, as found by another algorithm; by
            default `scale_method` chooses.
        zero_point: zero points that go with `scale`, for formats that have them.
        scale_method: name of a `ScaleMethod`: "absmax", "mse", "hqq" or a plugin's.
        act_scale: where `spec.act` is static, the scale of the activations (after the input steps): one,
            or one for each matrix.
        act_zero_point: likewise, where they have a zero point.
        in_perm: for the step "permute", a permutation of 0 … K-1, integers: (K,), or (..., K) with one
            permutation for each matrix.
        in_scale: for the step "scale", factors of the activations, finite and not 0, in the same shapes.
        low_rank: for the step "low_rank", B (N, r) and A (r, K) that are taken out of the weight, with a
            dimension more for experts.

    Raises:
        ConfigError: an argument of another type, or scales and zero points that are not finite or not one
            a block; or a scale that is not positive; or an `in_perm` or `in_scale` that cannot be undone.
        QuantizationError: x has NaN or inf or is not floating point; the format cannot hold the tensor, or
            `scale_method` is not "absmax" and the tensor is a `DTensor` or the format has no scales to
            choose; or `act_scale`, `act_zero_point`, `in_perm`, `in_scale` and `low_rank` are not what the
            format has, or
            the rows of x do not fit its input steps.
        UnknownNameError: nobody registered `scale_method`, or a name of the spec.
    """
    if not x.is_floating_point() or (type(x) in (Tensor, Parameter) and not x.is_meta):
        check = check_finite if spec.scale_dtype == NO_SCALE else check_quantizable
        check(x, "x")
    _check_qparams(x, spec, scale, zero_point)
    for name, value in (("act_scale", act_scale), ("act_zero_point", act_zero_point)):
        check_act(name, value)
    return quantize_values(
        x,
        spec,
        scale=scale,
        zero_point=zero_point,
        scale_method=scale_method,
        act_scale=act_scale,
        act_zero_point=act_zero_point,
        in_perm=in_perm,
        in_scale=in_scale,
        low_rank=low_rank,
    )


def quantize_values(
    x: Tensor,
    spec: Spec,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    scale_method: str = "absmax",
    act_scale: float | Tensor | None = None,
    act_zero_point: float | Tensor | None = None,
    in_perm: Tensor | None = None,
    in_scale: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    choose: Chooser | None = None,
) -> QTensor:
    """`quantize_tensor` where it is known that the values are finite, or there are none to look at.

    `choose`, of the form of `ScaleMethod.choose`, finds scales in place of `scale_method`.

    Raises:
        QuantizationError: x has no dimension, or is a `DTensor` while the spec has input steps; and whatever
            else `quantize_tensor` raises for a format that cannot hold it.
    """
    if x.dim() == 0:
        raise QuantizationError("a tensor without dimensions has no block to share a scale")
    shape, stored = tuple(x.shape), x
    if scale is None and choose is None:
        choose = _chooser(x, spec, scale_method)
    act = make_act_parts(spec, shape, x.device, act_scale, act_zero_point)
    steps = make_step_parts(spec, shape, x.device, in_perm, in_scale, low_rank)
    if spec.input:
        if is_sharded(x):
            raise QuantizationError(
                f"a DTensor cannot be quantized to {spec}, which has input steps; quantize before sharding"
            )
        stored = step_weight(x.detach(), spec, steps)
    parts = encode_parts(stored, stored_spec(spec), scale, zero_point, choose)
    return QTensor(parts | act | steps, spec, shape, x.dtype)


def _check_qparams(x: Tensor, spec: Spec, scale: Tensor | None, zero_point: Tensor | None) -> None:
    """Raise for scales or zero points that no block can have."""
    if zero_point is not None and scale is None:
        raise ConfigError(
            "zero_point without scale: zero points go with scales; pass both or neither"
        )
    if zero_point is not None and spec.zero_point == "none":
        raise ConfigError(
            f"zero_point={shown(zero_point)}: the format {spec} has no zero point; pass None"
        )
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value is None or type(value) is not Tensor or value.is_meta or not value.numel():
            continue
        least, greatest = (float(v) for v in torch.aminmax(value.detach().float()))
        positive = name == "scale" and registry.dtypes.get(spec.dtype).kind in _SCALED
        if not (isfinite(least) and isfinite(greatest)) or (positive and least <= 0):
            wanted = "finite and positive" if positive else "finite"
            raise ConfigError(
                f"{name}={shown(value)} has values from {least:g} to {greatest:g}; each must be {wanted}"
            )


def _chooser(x: Tensor, spec: Spec, scale_method: str) -> Chooser | None:
    """How the method finds scale and zero point, or None where the kernels that encode choose them."""
    choose = registry.scale_methods.get(scale_method).choose
    if choose is None:
        return None
    if is_sharded(x):
        raise QuantizationError(
            f"scale_method={scale_method!r} cannot look at a DTensor; quantize before sharding, "
            "or use 'absmax'"
        )
    dtype = registry.dtypes.get(spec.dtype)
    if dtype.kind not in _SCALED:
        raise QuantizationError(
            f"scale_method={scale_method!r} chooses scales of {', '.join(_SCALED)} formats; {dtype.name!r} "
            f"is of kind {dtype.kind!r}: use 'absmax'"
        )
    return partial(_chosen, scale_method)


def _chosen(
    scale_method: str, dense: Tensor, dtype: DType, spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that a method finds for each block."""
    answer, refusal = attempt(
        registry.scale_methods,
        scale_method,
        "choose",
        dense,
        dtype,
        spec,
        passed=AoError,
        timed=False,
    )
    if refusal is None and (wrong := _wrong_scales(answer, dense, spec)):
        refusal = f"{owner(registry.scale_methods, scale_method)}: {wrong}"
    if refusal is not None:
        raise QuantizationError(f"scale_method={scale_method!r}: {refusal}")
    return answer  # type: ignore[no-any-return]


def _wrong_scales(answer: Any, dense: Tensor, spec: Spec) -> str | None:
    """Why what a `ScaleMethod` returned is not a scale and zero point of every block, if so."""
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Tensor):
        return f"it returned {answer!r:.60}, not a scale and a zero point or None"
    grid = grid_shape(tuple(dense.shape), spec.block)
    for name, found in zip(("scale", "zero point"), answer, strict=True):
        if found is None:
            continue
        if not isinstance(found, Tensor) or tuple(found.shape) != grid:
            shape = tuple(found.shape) if isinstance(found, Tensor) else found
            return f"its {name} has the shape {shape}; {spec} has blocks {grid} of {tuple(dense.shape)}"
    return None
