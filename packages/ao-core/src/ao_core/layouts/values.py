"""Scales and zero points as numbers, whether they are stored plainly or as quantized tensors."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ao_core.numerics import scale_to_float

__all__ = ["scale_values", "zero_values"]


@overload
def scale_values(scale: Tensor) -> Tensor: ...
@overload
def scale_values(scale: None) -> None: ...
@overload
def scale_values(scale: Tensor | None) -> Tensor | None: ...


def scale_values(scale: Tensor | None) -> Tensor | None:
    """A scale, or an offset zero point, as float32, whether stored plainly or as a quantized tensor."""
    if scale is None:
        return None
    if hasattr(scale, "part_names"):
        return scale.dequantize(torch.float32)  # type: ignore[call-arg]
    return scale_to_float(scale)


def zero_values(zero_point: Tensor | None) -> Tensor | None:
    """A zero point as `numerics` takes it: as it is stored, or float32 where it is a quantized tensor."""
    return scale_values(zero_point) if hasattr(zero_point, "part_names") else zero_point
