"""Between dense values and parts: what the rules, kernels and saving share."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.layouts import Parts
from ao_core.numerics import dequantize_affine, scale_to_float
from ao_core.registry import registry
from ao_core.spec import Spec

__all__ = ["decode_parts", "scale_values", "unpack_parts"]


def scale_values(scale: Tensor) -> Tensor:
    """A scale as float32, whether stored plainly or as a quantized tensor."""
    if hasattr(scale, "part_names"):
        return scale.dequantize(torch.float32)  # type: ignore[call-arg,unused-ignore]
    return scale_to_float(scale)


def unpack_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(uint8 codes, float32 scale, zero) of the layout's blocked shape."""
    layout = registry.layouts.get(spec.layout)
    dtype = registry.dtypes.get(spec.dtype)
    if not layout.canonical:
        parts = layout.to_canonical(parts, spec, shape, dtype)
        layout = registry.layouts.get(layout.canonical_name)
    codes, scale, zero = layout.unpack(parts, spec, shape, dtype)
    return codes, scale_values(scale), zero


def decode_parts(
    parts: Parts, spec: Spec, shape: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """Dense values of the stored shape: (decode(code) - zero) * scale in float32, rounded once."""
    codes, scale, zero = unpack_parts(parts, spec, shape)
    dtype = registry.dtypes.get(spec.dtype)
    dense = dequantize_affine(codes, dtype, spec.block, scale, zero, out_dtype)
    return dense.reshape(shape)
