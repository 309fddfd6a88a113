"""Encoding and decoding of integers of at most 8 bits: unsigned, or in two's complement."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode_int", "encode_int"]


def encode_int(x: Tensor, bits: int, low: int, high: int) -> Tensor:
    """Code (uint8) of the nearest integer in [low, high], ties to even; NaN becomes 0."""
    values = x.detach().nan_to_num(0.0).round_().clamp_(low, high)
    if low >= 0:
        return values.to(torch.uint8)
    codes = values.to(torch.int8).view(torch.uint8)
    return codes if bits == 8 else codes.bitwise_and_((1 << bits) - 1)


def decode_int(codes: Tensor, bits: int, low: int, high: int) -> Tensor:
    """Value (float32) of each code; a code outside [low, high] reads as the nearer bound."""
    if low >= 0:
        return codes.to(torch.float32)
    if bits < 8:  # left and arithmetically right again: the sign fills the unused bits
        codes = (codes << (8 - bits)).view(torch.int8) >> (8 - bits)
    values = codes.view(torch.int8).to(torch.float32)
    return values if low == -(1 << (bits - 1)) else values.clamp_(low, high)
