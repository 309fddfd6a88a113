"""Encoding and decoding of floats of at most 8 bits, by arithmetic on the bits of wider floats."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.numerics.formats import E4M3, E5M2, FloatFormat

__all__ = ["decode_float", "encode_float"]

_NATIVE = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def encode_float(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Nearest code (uint8) of each value, ties to even, computed in float32.

    Values beyond the greatest finite one, infinities too, become ±max. Zeros and results that
    underflow keep their sign. NaN becomes NaN where the format has one, else 0.
    """
    x = x.detach().to(torch.float32)
    if fmt in _NATIVE:
        return x.clamp(-fmt.max, fmt.max).to(_NATIVE[fmt]).view(torch.uint8)
    magnitude = x.abs()
    if not fmt.has_nan:
        magnitude.nan_to_num_(0.0)
    magnitude.clamp_(max=fmt.max)
    # Adding 2**23 quanta to a magnitude leaves, after float32's own rounding to nearest even, the
    # number of quanta in the low bits and the exponent of the quantum in the high ones.
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    quanta = power.clamp_(min=fmt.smallest_normal).mul_(2.0 ** (23 - fmt.mbits))
    total = quanta.add_(magnitude).view(torch.int32)
    code = total.to(torch.uint8)
    code.add_(total.bitwise_right_shift_(23 - fmt.mbits).to(torch.uint8))
    code.sub_(((fmt.emin - fmt.mbits + 150) << fmt.mbits) & 0xFF)
    if fmt.has_nan:
        code.masked_fill_(torch.isnan(x), fmt.nan_code)
    return code.bitwise_or_(torch.signbit(x).to(torch.uint8) << (fmt.bits - 1))


def decode_float(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Exact float32 value of each code (uint8, in the low `fmt.bits`)."""
    # Every format is float16 with fewer bits: put the sign and the exponent where float16 has them
    # and correct the bias by a power of two. Several times faster than a table or a float8 cast.
    # In place, because on a CPU fresh memory costs more than the arithmetic.
    wide = codes.to(torch.int16).bitwise_left_shift_(16 - fmt.bits)
    if fmt.ebits < 5:
        gap = ((1 << (5 - fmt.ebits)) - 1) << (10 + fmt.ebits)
        # the shift copies the sign into the gap
        wide.bitwise_right_shift_(5 - fmt.ebits).bitwise_and_(~gap)
    if fmt.has_nan and not fmt.has_inf:
        # all ones but the sign: 1 more carries into the sign's place, from where all ones of float16's
        # exponent are made; comparisons and masks would take longer than all the rest
        carry = (codes & fmt.nan_code).add_(1).bitwise_right_shift_(fmt.bits - 1)
        wide.bitwise_or_(carry.to(torch.int16).mul_(0x7C00))
    return wide.view(torch.float16).to(torch.float32).mul_(2.0 ** (15 - fmt.bias))
