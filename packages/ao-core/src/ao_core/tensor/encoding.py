"""From dense values to parts: by scales that are chosen, found by a method, or given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ao_core.dispatch import run, select
from ao_core.errors import QuantizationError, UnsupportedOp
from ao_core.guarded import ask
from ao_core.layouts import Parts, check_spec, scale_values, zero_values
from ao_core.numerics import block_absmax, choose_qparams, full_block, quantize_affine
from ao_core.records import Call, DType
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, Spec
from ao_core.tensor.codec import decode_parts
from ao_core.tensor.options import check_options
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.scaled import encode_scaled, quantize_scaled
from ao_core.tensor.sharding import is_sharded

__all__ = [
    "Chooser",
    "already_quantized_as",
    "encode_parts",
    "encode_reference",
    "fake_quantize",
    "fake_quantize_reference",
]

#: `ScaleMethod.choose`
Chooser = Callable[[Tensor, DType, Spec], tuple[Tensor, Tensor | None]]


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

    Kernels choose scales themselves, by the largest magnitude, or take those that are given or found by
    `choose`, and take no `DTensor`; for those, and where scales follow another rule, the reference encodes.

    Args:
        x: (..., K) in any floating-point dtype, finite.
        spec: a format without input steps.
        scale: one per block, in the shape of `choose_qparams`; None: they are chosen.
        zero_point: one per block, given together with `scale`.
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
    x = x.detach()
    if choose is not None and not is_sharded(x) and _packs_given(x, spec):
        dense = x.contiguous().reshape(layout.blocked_shape(shape))  # scales inherit strides
        return quantize_scaled(x, *choose(dense, dtype, spec), spec)
    if choose is not None or is_sharded(x) or _scale_rule(spec) != "absmax" or not layout.canonical:
        return encode_reference(x, spec, scale, zero_point, choose)
    if scale is None:
        call = Call("quantize", spec, shape, shape, x.dtype, x.device.type)
        return run(call, x, spec)  # type: ignore[no-any-return]
    if isinstance(spec.scale_dtype, str) and spec.zero_point != "offset":
        return quantize_scaled(x, scale, zero_point, spec)
    return encode_reference(x, spec, scale, zero_point)


def _packs_given(x: Tensor, spec: Spec) -> bool:
    """Whether a kernel makes packed codes by scales that there are; the reference packs in several passes."""
    nested = not isinstance(spec.scale_dtype, str) or spec.scale_dtype == NO_SCALE
    if nested or spec.zero_point == "offset" or not registry.layouts.get(spec.layout).canonical:
        return False
    shape = tuple(x.shape)
    call = Call("quantize_scaled", spec, shape, shape, x.dtype, x.device.type)
    return select(call).priority >= 0


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
    """The reference kernel: what `Layout.encode` gives, by default codes and scales as `Spec` says.

    What is to be in a layout of its own goes through the canonical one, which may have a better kernel.
    """
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    if not layout.canonical:
        canonical = spec.in_layout(layout.canonical_of(spec, dtype))
        parts = encode_parts(x, canonical, scale, zero_point, choose)
        return layout.from_canonical(parts, spec, tuple(x.shape), dtype)

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
        scale = _quantized(scale, spec.scale_dtype, shared)
        if is_offset and zero_point is not None:
            zero_point = _quantized(zero_point, spec.scale_dtype)
    by = scale_values(scale)
    if nested and by is not None:
        by = torch.where(by == 0, torch.inf, by)  # rounded to 0: its elements are 0, not 0 / 0
    point = zero_values(zero_point)
    if given and by is not None and not is_offset:
        return encode_scaled(dense, by, point, spec), scale, zero_point
    codes = quantize_affine(dense, dtype, spec.block, by, point, is_offset=is_offset)
    return codes, scale, zero_point


def _quantized(values: Tensor, spec: Spec, shared: Tensor | None = None) -> QTensor:
    """Scales or offsets as a quantized tensor, whose own scale may be given."""
    parts = encode_parts(values.float(), spec, shared)
    return QTensor(parts, spec, tuple(values.shape), torch.float32)


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
        zero_point: likewise, given together with `scale`, for formats that have one.
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
