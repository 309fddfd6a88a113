"""From a dense tensor to a `QTensor`: choose scales, encode, pack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ao_core.arguments import checked, shown
from ao_core.dispatch import run
from ao_core.errors import AoError, ConfigError, QuantizationError, UnsupportedOp
from ao_core.guarded import ask, attempt, owner
from ao_core.layouts import Parts, check_spec, scale_values, zero_values
from ao_core.numerics import (
    block_absmax,
    choose_qparams,
    full_block,
    grid_shape,
    quantize_affine,
)
from ao_core.records import Call, DType
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, Spec
from ao_core.tensor.activations import check_act, make_act_parts
from ao_core.tensor.checks import check_finite, check_quantizable
from ao_core.tensor.codec import decode_parts
from ao_core.tensor.input_steps import make_step_parts, step_weight, stored_spec
from ao_core.tensor.options import check_options
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.scaled import encode_scaled
from ao_core.tensor.sharding import is_sharded

__all__ = [
    "already_quantized_as",
    "encode_parts",
    "encode_reference",
    "fake_quantize",
    "fake_quantize_reference",
    "quantize_tensor",
    "quantize_values",
]

#: kinds of number formats whose values a scale multiplies
_SCALED = ("int", "float", "lut")
#: `ScaleMethod.choose`
Chooser = Callable[[Tensor, DType, Spec], tuple[Tensor, Tensor | None]]


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


def encode_parts(
    x: Tensor,
    spec: Spec,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    choose: Chooser | None = None,
) -> Parts:
    """The parts of `x` in the layout of `spec`, by the best kernel of the op "quantize".

    A `QTensor` of that format has its own, which are not found again; one of another is dequantized. The
    spec has no input steps: these are taken before, by `step_weight`.

    Kernels choose scales themselves, by the largest magnitude, and take no `DTensor`; for those, and
    where scales are given, found by `choose` or follow another rule, the reference encodes.

    Args:
        x: (..., K) in any floating-point dtype, finite.
        spec: a format without input steps.
        scale: one per block, in the shape of `choose_qparams`; None: they are chosen.
        zero_point: one per block, beside `scale`.
        choose: (values, format) -> scale and zero point, in place of the largest magnitude.

    Raises:
        UnsupportedOp: `spec` has input steps.
        QuantizationError: the layout cannot hold a tensor of this shape, or a static scale is not given.
    """
    if spec.input:
        raise UnsupportedOp(
            f"{spec}: values are encoded after its input steps, by `stored_spec` of it"
        )
    if already_quantized_as(x, spec):
        return x.parts  # type: ignore[attr-defined,no-any-return]
    if isinstance(x, QTensor):
        x = x.dequantize()
    check_options(spec)
    if spec.is_static and scale is None:
        raise QuantizationError(f"{spec}: a static scale is not chosen but given")
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    check_spec(spec, dtype)
    shape = tuple(x.shape)
    if reason := ask(registry.layouts, layout.name, "refuses", spec, shape, dtype):
        raise QuantizationError(f"layout {spec.layout!r} cannot hold a tensor of {shape}: {reason}")
    if not layout.canonical:
        canonical = spec.in_layout(layout.canonical_of(spec, dtype))
        parts = encode_parts(x, canonical, scale, zero_point, choose)
        return layout.from_canonical(parts, spec, shape, dtype)
    x = x.detach()
    given = scale is not None or choose is not None
    if given or is_sharded(x) or _scale_rule(spec) != "absmax":
        return encode_reference(x, spec, scale, zero_point, choose)
    call = Call("quantize", spec, shape, shape, x.dtype, x.device.type)
    return run(call, x, spec)  # type: ignore[no-any-return]


def already_quantized_as(x: Tensor, spec: Spec) -> bool:
    """Whether `x` holds its values as `spec` says, but for options and activations."""
    if not isinstance(x, QTensor) or x.is_permuted:
        return False
    formats = [
        (s.dtype, full_block(s.block, x.shape), s.scale_dtype, s.zero_point, s.layout, s.input)
        for s in (x.spec, spec)
    ]
    return formats[0] == formats[1]


def encode_reference(
    x: Tensor,
    spec: Spec,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    choose: Chooser | None = None,
) -> Parts:
    """The reference kernel: what `Layout.encode` gives, by default codes and scales as `Spec` says."""
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)

    def quantize(dense: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return _quantize(dense, spec, dtype, scale, zero_point, choose)

    # contiguous, since codes and scales inherit strides
    return layout.encode(x.contiguous(), spec, dtype, quantize)


def _quantize(
    dense: Tensor,
    spec: Spec,
    dtype: DType,
    scale: Tensor | None,
    zero_point: Tensor | None,
    choose: Chooser | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes, scale and zero point of values of the blocked shape."""
    nested, shared = isinstance(spec.scale_dtype, Spec), None
    given = scale is not None or choose is not None
    if isinstance(spec.scale_dtype, Spec) and spec.scale_dtype.is_static:
        scale, shared = None, scale  # what is given is the scale that the scales share
    if scale is None and spec.scale_dtype != NO_SCALE:
        if choose is not None:
            scale, zero_point = choose(dense, dtype, spec)
        else:
            scale, zero_point = choose_qparams(
                dense,
                dtype,
                spec.block,
                spec.zero_point,
                spec.chosen_scale_dtype,
                mx_mode=str(spec.option("mx_mode", "floor")),
                rule=_scale_rule(spec),
            )
        if nested:
            scale = _comparable(scale, dense, spec)
    is_offset = spec.zero_point == "offset"
    if isinstance(spec.scale_dtype, Spec) and scale is not None and not isinstance(scale, QTensor):
        scale = quantize_values(scale.float(), spec.scale_dtype, scale=shared)
        if is_offset and zero_point is not None:
            zero_point = quantize_values(zero_point.float(), spec.scale_dtype)
    by = scale_values(scale)
    if nested and by is not None:
        by = torch.where(by == 0, torch.inf, by)  # rounded to 0: its elements are 0, not 0 / 0
    point = zero_values(zero_point)
    if given and by is not None and not is_offset:
        return encode_scaled(dense, by, point, spec), scale, zero_point
    codes = quantize_affine(dense, dtype, spec.block, by, point, is_offset=is_offset)
    return codes, scale, zero_point


def _comparable(scale: Tensor, dense: Tensor, spec: Spec) -> Tensor:
    """Scales that are to share one scale: a block of zeros takes the least of them, not 1."""
    if scale.numel() == 0:
        return scale
    zeros = block_absmax(dense, spec.block) == 0
    least = torch.where(zeros, torch.inf, scale).amin().nan_to_num(posinf=1.0)
    return torch.where(zeros, least, scale)


def fake_quantize(
    x: Tensor, spec: Spec, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> Tensor:
    """`x` after quantization to `spec` and back, in its own dtype and without a gradient.

    By a given scale and zero point, or by those that a kernel of the op "fake_quantize" chooses for it.

    Args:
        x: floating-point values (..., K).
        spec: the format; its layout does not matter.
        scale: one per block, in the shape of `choose_qparams`.
        zero_point: likewise, beside `scale`, for formats that have one.
    """
    plain = spec.in_layout("plain")
    if scale is not None or isinstance(x, QTensor) or is_sharded(x):
        return decode_parts(
            encode_parts(x, plain, scale, zero_point), plain, tuple(x.shape), x.dtype
        )
    check_options(plain)
    check_spec(plain, registry.dtypes.get(plain.dtype))
    call = Call("fake_quantize", plain, tuple(x.shape), tuple(x.shape), x.dtype, x.device.type)
    return run(call, x.detach(), plain)  # type: ignore[no-any-return]


def fake_quantize_reference(x: Tensor, spec: Spec) -> Tensor:
    """The reference kernel: to parts and back."""
    return decode_parts(encode_parts(x, spec), spec, tuple(x.shape), x.dtype)


def _scale_rule(spec: Spec) -> str:
    return str(spec.option("scale_rule", "absmax"))
