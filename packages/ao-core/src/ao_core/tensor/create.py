"""From a dense tensor to a `QTensor`: choose scales, encode, pack."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from ao_core.dispatch import select
from ao_core.errors import ConfigError, QuantizationError
from ao_core.layouts import Layout, Parts
from ao_core.numerics import block_absmax, choose_qparams, full_block, quantize_affine
from ao_core.records import Call, DType
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, Spec
from ao_core.tensor.activations import make_act_parts
from ao_core.tensor.codec import decode_parts, is_sharded, scale_values, zero_values
from ao_core.tensor.qtensor import QTensor

__all__ = [
    "check_quantizable",
    "encode_parts",
    "encode_reference",
    "fake_quantize",
    "fake_quantize_reference",
    "is_cast",
    "quantize_tensor",
    "scale_spec",
]

#: kinds of number formats whose values a scale multiplies
_SCALED = ("int", "float", "codebook")


def check_quantizable(x: Tensor, name: str = "tensor") -> None:
    """Raise `QuantizationError` unless `x` holds finite floating-point values on a real device."""
    if not x.is_floating_point():
        raise QuantizationError(
            f"{name} has dtype {x.dtype}; only floating-point tensors can be quantized"
        )
    if x.device.type == "meta":
        raise QuantizationError(
            f"{name} is on the meta device and has no values; load its weights first"
        )
    if not _is_finite(x):
        bad = int((~torch.isfinite(x)).sum())
        raise QuantizationError(
            f"{name} has {bad} NaN or inf values of {x.numel()}; repair the checkpoint or exclude it"
        )


def _is_finite(x: Tensor) -> bool:
    if x.numel() == 0:
        return True
    # one pass that writes nothing: NaN becomes both extremes, infinity is one of them
    return all(isfinite(float(extreme)) for extreme in torch.aminmax(x.detach()))


def quantize_tensor(
    x: Tensor,
    spec: Spec,
    *,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    scales: str = "absmax",
    act_scale: float | Tensor | None = None,
    act_zero: float | Tensor | None = None,
) -> QTensor:
    """Quantize a dense tensor.

    Args:
        x: floating-point tensor of any shape with at least one dimension.
        spec: the format.
        scale: one value a block as found by another algorithm; by default `scales` chooses.
        zero: zero points that go with `scale`, for formats that have them.
        scales: name of a `ScaleMethod`: "absmax", "mse", "hqq" or a plugin's.
        act_scale: where `spec.act` is static, the scale of the activations: one, or one for each matrix.
        act_zero: likewise, where they have a zero point.

    Raises:
        QuantizationError: the format cannot hold the tensor, or `scales` is not "absmax" and the
            tensor is a `DTensor` or the format has no scales to choose; or `act_scale` and `act_zero`
            are not what the format has.
        UnknownNameError: nobody registered `scales`, or a name of the spec.
    """
    if x.dim() == 0:
        raise QuantizationError("a tensor without dimensions has no block to share a scale")
    if scale is None:
        scale, zero = _choose(x.detach(), spec, scales)
    act = make_act_parts(spec, tuple(x.shape), x.device, act_scale, act_zero)
    parts = encode_parts(x, spec, scale, zero) | act
    return QTensor(parts, spec, tuple(x.shape), x.dtype)


def _choose(x: Tensor, spec: Spec, scales: str) -> tuple[Tensor | None, Tensor | None]:
    """Scale and zero point of every block, or None where the kernels that encode choose them."""
    choose = registry.scales.get(scales).choose
    if choose is None:
        return None, None
    if is_sharded(x):
        raise QuantizationError(
            f"scales={scales!r} cannot look at a DTensor; quantize before sharding, or use 'absmax'"
        )
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    if dtype.kind not in _SCALED:
        raise QuantizationError(
            f"scales={scales!r} chooses scales of {', '.join(_SCALED)} formats; {dtype.name!r} is of "
            f"kind {dtype.kind!r}: use 'absmax'"
        )
    if not layout.canonical:
        layout = registry.layouts.get(layout.canonical_name)
    dense = _projected(x, layout, spec)
    scale, zero = choose(dense, dtype, spec)
    if isinstance(spec.scale_dtype, Spec):
        scale = _comparable(scale, dense, spec)
    return scale, zero


def _projected(x: Tensor, layout: Layout, spec: Spec) -> Tensor:
    """The values that the layout holds, contiguous, since codes and scales inherit strides."""
    dense = x.contiguous().reshape(layout.blocked_shape(tuple(x.shape)))
    return layout.project(dense, spec)


def encode_parts(
    x: Tensor, spec: Spec, scale: Tensor | None = None, zero: Tensor | None = None
) -> Parts:
    """The parts of `x` in the layout of `spec`, by the best kernel of the op "quantize".

    A `QTensor` of that format has its own, which are not found again; one of another is dequantized.

    Kernels choose scales themselves, by the largest magnitude, and take no `DTensor`; for those, and
    where scales are given or follow another rule, the reference encodes.
    """
    if is_cast(x, spec):
        return x.parts  # type: ignore[attr-defined,no-any-return]
    if isinstance(x, QTensor):
        x = x.dequantize()
    if spec.static and scale is None:
        raise QuantizationError(f"{spec}: a static scale is not chosen but given")
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    _check_scale(spec, dtype)
    shape = tuple(x.shape)
    if reason := layout.fits(spec, shape, dtype):
        raise QuantizationError(f"layout {spec.layout!r} cannot hold a tensor of {shape}: {reason}")
    if not layout.canonical:
        canonical = replace(spec, layout=layout.canonical_name)
        return layout.from_canonical(encode_parts(x, canonical, scale, zero), spec, shape, dtype)
    x = x.detach()
    if scale is not None or is_sharded(x) or _scale_rule(spec) != "absmax":
        return encode_reference(x, spec, scale, zero)
    call = Call("quantize", spec, shape, shape, x.dtype, x.device.type)
    return select(call).fn(x, spec)  # type: ignore[no-any-return]


def _check_scale(spec: Spec, dtype: DType) -> None:
    if dtype.has_scale == (spec.scale_dtype == NO_SCALE):
        raise ConfigError(
            f"scale_dtype={spec.scale_dtype!r} with {dtype.name!r}, of kind {dtype.kind!r}: formats of kind "
            f"'dense' have no scale, which {NO_SCALE!r} says, and all others have one"
        )


def is_cast(x: Tensor, spec: Spec) -> bool:
    """Whether `x` holds its values as `spec` says, but for options and activations."""
    if not isinstance(x, QTensor) or x.is_permuted:
        return False
    formats = [
        (s.dtype, full_block(s.block, x.shape), s.scale_dtype, s.zero, s.layout)
        for s in (x.spec, spec)
    ]
    return formats[0] == formats[1]


def encode_reference(
    x: Tensor, spec: Spec, scale: Tensor | None = None, zero: Tensor | None = None
) -> Parts:
    """The reference kernel: what the layout holds of x, as `Spec` says, encoded and packed."""
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    dense = _projected(x, layout, spec)
    if scale is None and spec.scale_dtype != NO_SCALE:
        scale, zero = choose_qparams(
            dense,
            dtype,
            spec.block,
            spec.zero,
            scale_spec(spec),
            mx_mode=str(spec.option("mx_mode", "floor")),
            rule=_scale_rule(spec),
        )
        if isinstance(spec.scale_dtype, Spec):
            scale = _comparable(scale, dense, spec)
    scaled = spec.zero == "scaled"
    if isinstance(spec.scale_dtype, Spec) and scale is not None and not isinstance(scale, QTensor):
        scale = quantize_tensor(scale.float(), spec.scale_dtype)
        if scaled and zero is not None:
            zero = quantize_tensor(zero.float(), spec.scale_dtype)
    by = scale_values(scale)
    if isinstance(spec.scale_dtype, Spec) and by is not None:
        by = torch.where(by == 0, torch.inf, by)  # rounded to 0: its elements are 0, not 0 / 0
    codes = quantize_affine(dense, dtype, spec.block, by, zero_values(zero), scaled=scaled)
    return layout.pack(codes, scale, zero, spec, dtype)


def _comparable(scale: Tensor, dense: Tensor, spec: Spec) -> Tensor:
    """Scales that are to share one scale: a block of zeros takes the least of them, not 1."""
    if scale.numel() == 0:
        return scale
    zeros = block_absmax(dense, spec.block) == 0
    least = torch.where(zeros, torch.inf, scale).amin().nan_to_num(posinf=1.0)
    return torch.where(zeros, least, scale)


def fake_quantize(
    x: Tensor, spec: Spec, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """`x` after quantization to `spec` and back, in its own dtype and without a gradient.

    By a given scale and zero point, or by those that a kernel of the op "fake_quantize" chooses for it.
    """
    plain = replace(spec, layout="plain")
    if scale is not None or isinstance(x, QTensor) or is_sharded(x):
        return decode_parts(encode_parts(x, plain, scale, zero), plain, tuple(x.shape), x.dtype)
    call = Call("fake_quantize", plain, tuple(x.shape), tuple(x.shape), x.dtype, x.device.type)
    return select(call).fn(x.detach(), plain)  # type: ignore[no-any-return]


def fake_quantize_reference(x: Tensor, spec: Spec) -> Tensor:
    """The reference kernel: to parts and back."""
    return decode_parts(encode_parts(x, spec), spec, tuple(x.shape), x.dtype)


def scale_spec(spec: Spec) -> str:
    """The dtype in which scales are first chosen: float32 where they are quantized afterwards."""
    return spec.scale_dtype if isinstance(spec.scale_dtype, str) else "float32"


def _scale_rule(spec: Spec) -> str:
    return str(spec.option("scale_rule", "absmax"))
