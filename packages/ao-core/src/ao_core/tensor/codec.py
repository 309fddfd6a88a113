"""Between dense values and parts: what the rules, kernels and saving share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from ao_core.dispatch import select
from ao_core.layouts import Parts
from ao_core.numerics import dequantize_affine, scale_to_float
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec

__all__ = [
    "autocasted",
    "decode_parts",
    "decode_reference",
    "is_sharded",
    "local_shard",
    "scale_values",
    "unpack_parts",
    "zero_values",
]


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a `DTensor`, which takes only operations that torch has sharding rules for."""
    return hasattr(x, "placements")


def local_shard(x: Any) -> Any:
    """What this rank holds of a `DTensor`, apart from autograd; anything else itself."""
    return getattr(x, "_local_tensor", x)


def autocasted(x: Any, *others: Any) -> tuple[Any, ...]:
    """Operands of a product in the dtype of autocast, where it is on for the device of x; None stays."""
    if not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if each is None else each.to(dtype) for each in (x, *others))


@overload
def scale_values(scale: Tensor) -> Tensor: ...
@overload
def scale_values(scale: None) -> None: ...
@overload
def scale_values(scale: Tensor | None) -> Tensor | None: ...


def scale_values(scale: Tensor | None) -> Tensor | None:
    """A scale, or a scaled zero point, as float32, whether stored plainly or as a quantized tensor."""
    if scale is None:
        return None
    if hasattr(scale, "part_names"):
        return scale.dequantize(torch.float32)  # type: ignore[call-arg]
    return scale_to_float(scale)


def zero_values(zero: Tensor | None) -> Tensor | None:
    """A zero point as `numerics` takes it: as it is stored, or float32 where it is a quantized tensor."""
    return scale_values(zero) if hasattr(zero, "part_names") else zero


def unpack_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(codes, float32 scale, zero that is not quantized) of the layout's blocked shape."""
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    if not layout.canonical:
        parts = layout.to_canonical(parts, spec, shape, dtype)
        layout = registry.layouts.get(layout.canonical_name)
    codes, scale, zero = layout.unpack(parts, spec, shape, dtype)
    return codes, scale_values(scale), zero_values(zero)


def decode_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """Dense values of the stored shape, by the best kernel of the op "dequantize"."""
    first = next(iter(parts.values()))
    if is_sharded(first):
        return decode_reference(parts, spec, shape, out_dtype)
    call = Call("dequantize", spec, shape, shape, out_dtype, first.device.type)
    return select(call).fn(parts, spec, shape, out_dtype)  # type: ignore[no-any-return]


def decode_reference(
    parts: Parts, spec: Spec, shape: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """The reference kernel: (decode(code) - zero) * scale, or decode(code), rounded once; see `Spec`.

    What is in a layout of its own goes through the canonical one, which may have a better kernel.
    """
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    if not layout.canonical:
        parts = layout.to_canonical(parts, spec, shape, dtype)
        return decode_parts(parts, replace(spec, layout=layout.canonical_name), shape, out_dtype)
    codes, scale, zero = layout.unpack(parts, spec, shape, dtype)
    by, point, scaled = scale_values(scale), zero_values(zero), spec.zero == "scaled"
    dense = dequantize_affine(codes, dtype, spec.block, by, point, out_dtype, scaled=scaled)
    return dense.reshape(shape)
