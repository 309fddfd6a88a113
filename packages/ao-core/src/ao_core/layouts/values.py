"""Scales and zero points as numbers, whether they are stored plainly or as quantized tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from ao_core.numerics import scale_to_float

if TYPE_CHECKING:
    from ao_core.layouts.base import Parts
    from ao_core.records import DType
    from ao_core.spec import Spec

__all__ = ["has_foreign_zeros", "scale_values", "zero_values"]


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


def has_foreign_zeros(parts: Parts, spec: Spec, dtype: DType) -> bool:
    """Whether a zero point is no code of its format, such as 16 with 4 bits, which GPTQ files may have.

    The reference takes it for the number that it is. Compiled kernels look codes up in tables of 2**bits
    values, and must leave such a tensor to the reference. While tracing no value may decide anything: False.
    """
    zero_point = parts.get("zero_point")
    if spec.zero_point != "int" or dtype.bits >= 8 or type(zero_point) is not Tensor:
        return False
    if torch.compiler.is_compiling() or zero_point.is_meta or not zero_point.numel():
        return False
    return int(zero_point.max()) >= 1 << dtype.bits
