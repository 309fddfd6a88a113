"""Candidates for scales and zero points, rounded to what is stored, as float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.numerics import choose_e8m0
from ao_core.numerics.affine import SCALE_STORAGE, scale_storage, zero_storage
from ao_core.records import DType
from ao_core.spec import Spec

__all__ = ["rounded_scale", "rounded_zero"]


def rounded_scale(scale: Tensor, scale_dtype: str) -> Tensor:
    """Positive float32 scales, rounded and clamped to what a storage holds, see `numerics.store_qparams`.

    They are cast there and back, which compilers may drop: for searches, which are not compiled.
    """
    if scale_dtype == "e8m0":  # a factor of sqrt(2): to the nearest power of two
        return choose_e8m0(scale, 2.0**0.5, "rceil")
    storage, least, greatest = SCALE_STORAGE[scale_dtype]
    return scale.clamp(least, greatest).to(storage).to(torch.float32)


def rounded_zero(point: Tensor, scale: Tensor, dtype: DType, spec: Spec) -> Tensor:
    """Zero points in the domain of codes, rounded and clamped to what `spec` stores.

    Args:
        point: any numbers, float32.
        scale: the scale of each, as stored, in float32.
        dtype: the number format.
        spec: the kind of zero points, not "none", and the storage of scales.
    """
    point = point.clamp(dtype.min, dtype.max)
    if spec.zero_point == "int":
        return point.round_()
    storage = zero_storage(spec.zero_point, scale_storage(spec.chosen_scale_dtype))
    if spec.zero_point == "float":
        return point.to(storage).to(torch.float32)
    greatest = torch.finfo(storage).max
    return point.mul_(scale).clamp_(-greatest, greatest).to(storage).to(torch.float32) / scale
