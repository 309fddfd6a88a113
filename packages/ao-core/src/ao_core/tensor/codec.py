"""Between dense values and parts: what the rules, kernels and saving share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.layouts import Parts, scale_values, zero_values
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.input_steps import stored_spec, unstep_weight

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
    """Operands of a product in the dtype of autocast, where it is on for the device of x.

    As for torch's own products, float64 and what is no floating-point number stay; so does None.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each.to(dtype) if _is_cast(each) else each for each in (x, *others))


def _is_cast(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and x.dtype != torch.float64


def unpack_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(codes, float32 scale, zero that is not quantized) of the layout's blocked shape."""
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    if not layout.canonical:
        parts = layout.to_canonical(parts, spec, shape, dtype)
        layout = registry.layouts.get(layout.canonical_of(spec, dtype))
    codes, scale, zero_point = layout.unpack(parts, spec, shape, dtype)
    return codes, scale_values(scale), zero_values(zero_point)


def decode_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """Dense values of the stored shape, by the best kernel of the op "dequantize".

    Input steps are undone: the values are the logical ones.
    """
    if spec.input:
        stored = stored_spec(spec)
        return unstep_weight(
            lambda wide: decode_parts(parts, stored, shape, wide), spec, parts, out_dtype
        )
    first = next(iter(parts.values()))
    if is_sharded(first):
        return decode_reference(parts, spec, shape, out_dtype)
    call = Call("dequantize", spec, shape, shape, out_dtype, first.device.type)
    return run(call, parts, spec, shape, out_dtype)  # type: ignore[no-any-return]


def decode_reference(
    parts: Parts, spec: Spec, shape: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """The reference kernel: what `Layout.decode` gives, by default (decode(code) - zero) * scale.

    What is in a layout of its own goes through the canonical one, which may have a better kernel.
    """
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    if not layout.canonical:
        parts = layout.to_canonical(parts, spec, shape, dtype)
        canonical = replace(spec, layout=layout.canonical_of(spec, dtype))
        return decode_parts(parts, canonical, shape, out_dtype)
    return layout.decode(parts, spec, shape, dtype, out_dtype)
