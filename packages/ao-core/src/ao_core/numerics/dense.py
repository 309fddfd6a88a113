"""Values as torch stores them: float32, or rounded to 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.numerics.rounding import round_to_16_bits

__all__ = ["decode_dense", "encode_dense"]


def encode_dense(x: Tensor, storage: torch.dtype) -> Tensor:
    """The nearest finite value of `storage`, ties to even; NaN stays NaN."""
    greatest = torch.finfo(storage).max
    values = x.detach().to(torch.float32).clamp(-greatest, greatest)
    if storage != torch.float32:
        values = round_to_16_bits(values, storage)
    return values.to(storage)


def decode_dense(values: Tensor) -> Tensor:
    """The values in float32, exact."""
    return values.to(torch.float32, copy=True)
