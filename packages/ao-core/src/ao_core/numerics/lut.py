"""LUT formats: a code is an index into a fixed, increasing list of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = [
    "NF4_VALUES",
    "decode_lut",
    "encode_between",
    "encode_lut",
    "lut_bounds",
]

#: NormalFloat4: quantiles of the standard normal distribution scaled to [-1, 1], with an exact 0.
#: Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E.
NF4_VALUES: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def encode_lut(x: Tensor, values: Sequence[float]) -> Tensor:
    """Index (uint8) of the nearest of the increasing `values`, computed in float32.

    A tie goes to the lower value; beyond either end the end is nearest; NaN is encoded as 0.0 is.
    """
    return encode_between(x, lut_bounds(values))


def lut_bounds(values: Sequence[float]) -> tuple[float, ...]:
    """The greatest float32 that each of the increasing `values` but the last one is nearest to."""
    return tuple(_float32_floor((a + b) / 2) for a, b in pairwise(values))


def encode_between(x: Tensor, bounds: Sequence[float]) -> Tensor:
    """`encode_lut` with the bounds of its values."""
    x = x.detach().to(torch.float32).nan_to_num(0.0)
    if len(bounds) > 16:
        table = torch.tensor(bounds, dtype=torch.float32, device=x.device)
        return torch.bucketize(x.contiguous(), table, out_int32=True).to(torch.uint8)
    # The same by counting the bounds below x, several times faster for few of them, and in float32, since
    # torch on the CPU compares in vectors only where the result is as wide as what is compared.
    count, above = torch.zeros_like(x), torch.empty_like(x)
    for bound in bounds:
        count.add_(torch.gt(x, bound, out=above))
    return count.to(torch.uint8)


def decode_lut(codes: Tensor, values: Sequence[float]) -> Tensor:
    """Value (float32) of each index; an index beyond the last value reads as the last."""
    # Padded to a power of two, so that no bit pattern of a packed code is out of range.
    surplus = (1 << (len(values) - 1).bit_length()) - len(values)
    padded = [*values, *[values[-1]] * surplus]
    table = torch.tensor(padded, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().to(torch.int32)).reshape(codes.shape)


def _float32_floor(value: float) -> float:
    """The greatest float32 <= value: a float32 exceeds both or neither."""
    mantissa, exponent = math.frexp(value)
    shift = max(exponent - 24, -149)
    return math.ldexp(math.floor(math.ldexp(mantissa, exponent - shift)), shift)
