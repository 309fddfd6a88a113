"""The types of GGUF whose scales follow the extremes of a block, encoded as ggml does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import DType, Spec

__all__ = ["LEGACY", "Blocks", "Steps", "half"]

_GREATEST = torch.finfo(torch.float16).max


class Steps(NamedTuple):
    """The scales or zero points of G super-blocks of S blocks."""

    #: uint8 (G, S), codes of multiples of `of`; None: there are none, and `of` has one for each block
    codes: Tensor | None
    #: float16 (G, 1)
    of: Tensor


class Blocks(NamedTuple):
    """Super-blocks that are encoded."""

    #: uint8 (G, S, E)
    codes: Tensor
    scale: Steps
    #: scaled, as in `Spec`
    zero_point: Steps | None


def half(x: Tensor) -> Tensor:
    """Float16, finite where `x` is."""
    return x.clamp(-_GREATEST, _GREATEST).to(torch.float16)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for a block of zeros or one whose scale has no inverse."""
    inverse = scale.reciprocal()
    return torch.where(torch.isfinite(inverse), inverse, 0.0)


def _signed(x: Tensor, dtype: DType, nested: Spec | None) -> Blocks:
    """The element of greatest magnitude, the first of them, gets the least code, whatever its sign."""
    greatest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = greatest / dtype.min
    offset = -dtype.min
    codes = torch.trunc(x * _inverse(scale) + (offset + 0.5)).clamp(0, 2 * offset - 1) - offset
    return Blocks(dtype.encode(codes), Steps(None, half(scale.squeeze(-1))), None)


def _ranged(x: Tensor, dtype: DType, nested: Spec | None) -> Blocks:
    """The range of a block, which need not hold 0, in even steps."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / dtype.max
    codes = torch.trunc((x - low) * _inverse(scale) + 0.5)
    steps = Steps(None, half(scale.squeeze(-1)))
    return Blocks(dtype.encode(codes), steps, Steps(None, -half(low.squeeze(-1))))


def _eight_bits(x: Tensor, dtype: DType, nested: Spec | None) -> Blocks:
    """The greatest magnitude gets the greatest code; halves are rounded away from zero."""
    scale = x.abs().amax(-1, keepdim=True) / dtype.max
    ratio = x * _inverse(scale)
    size = ratio.abs().floor()
    codes = ratio.sign() * (size + torch.floor(2 * (ratio.abs() - size)))
    return Blocks(dtype.encode(codes), Steps(None, half(scale.squeeze(-1))), None)


#: type -> (blocks (G, 1, E), their format, None) -> codes and scales
LEGACY: dict[str, Callable[[Tensor, DType, Spec | None], Blocks]] = {
    "q4_0": _signed,
    "q4_1": _ranged,
    "q5_0": _signed,
    "q5_1": _ranged,
    "q8_0": _eight_bits,
}
