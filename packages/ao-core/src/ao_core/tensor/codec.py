"""Between dense values and parts: what the rules, kernels and saving share."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.layouts import Parts, scale_values, zero_values
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.input_steps import stored_spec, unstep_weight
from ao_core.tensor.sharding import is_sharded

__all__ = [
    "decode_parts",
    "decode_reference",
    "scale_values",
    "unpack_parts",
    "zero_values",
]


def unpack_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes, scale and zero point from the parts of any layout.

    Args:
        parts: by name, as `QTensor.parts` has them.
        spec: their format.
        shape: the stored shape, (..., K).

    Returns:
        The codes (uint8, or the values of a format of dense ones) in the blocked shape of the layout, which
        is `shape` unless the layout says otherwise; the scale in float32, and the zero point, not quantized:
        one per block, or None.
    """
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

    Args:
        parts: by name, as `QTensor.parts` has them.
        spec: their format.
        shape: the stored shape, (..., K).
        out_dtype: of the values: float32, bfloat16 or float16, to which they are rounded once.
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
        canonical = spec.in_layout(layout.canonical_of(spec, dtype))
        return decode_parts(parts, canonical, shape, out_dtype)
    return layout.decode(parts, spec, shape, dtype, out_dtype)
