"""How far an approximation is from its reference."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cosine", "relative_error", "sqnr"]

def sqnr(ref: Tensor, approx: Tensor) -> Tensor:
    """Signal to quantization noise in dB: 20 log10(|ref| / |ref - approx|); inf where equal.

    Sums in float64; 0-dimensional float64.
    """
    return -20.0 * torch.log10(relative_error(ref, approx))

def relative_error(ref: Tensor, approx: Tensor) -> Tensor:
    """|ref - approx| / |ref| in the Euclidean norm; 0 where equal, inf where only `ref` is zero."""
    ref = ref.detach().to(torch.float64)
    noise = torch.linalg.vector_norm(ref - approx.detach())
    return torch.where(noise == 0, 0.0, noise / torch.linalg.vector_norm(ref))

def cosine(ref: Tensor, approx: Tensor) -> Tensor:
    """Cosine of the angle between two tensors as vectors; 1 where both are zero, 0 where one is."""
    a = ref.detach().to(torch.float64).flatten()
    b = approx.detach().to(torch.float64).flatten()
    product = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    both_zero = (a == b).all().to(torch.float64)
    return torch.where(product == 0, both_zero, torch.dot(a, b) / product)
