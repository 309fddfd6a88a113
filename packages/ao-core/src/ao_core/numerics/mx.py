"""Power-of-two scales (E8M0) as in OCP Microscaling Formats (MX) v1.0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ao_core.errors import ConfigError

__all__ = ["E8M0_BIAS", "E8M0_NAN", "MX_MODES", "choose_e8m0", "decode_e8m0", "encode_e8m0"]

#: An E8M0 code `c` stands for 2**(c - E8M0_BIAS), the code E8M0_NAN for NaN; there is no zero.
E8M0_BIAS = 127
E8M0_NAN = 255
MX_MODES = ("floor", "ceil", "even", "rceil")


def choose_e8m0(
    absmax: Tensor, element_max: float, mode: str = "floor", step: float | Tensor = 0.0
) -> Tensor:
    """The power of two (float32) that scales blocks of magnitude `absmax` to an element format.

    `element_max` is the greatest value of that format; with emax = floor(log2(element_max)):

    - "floor": 2**(floor(log2(absmax)) - emax), the rule of MX v1.0, section 6.3; some saturate
    - "ceil": 2**(ceil(log2(absmax)) - emax)
    - "even": "floor" of absmax rounded to the element's mantissa, halves up; `step` is the distance
      from `element_max` to the value below it where the format has its full mantissa there
    - "rceil": 2**ceil(log2(absmax / element_max)), the least that saturates nothing

    The exponent is clamped to [-127, 127]. A block of zeros gets 1, infinity and NaN give NaN.

    Args:
        absmax: the largest magnitude of each block, any shape.
        element_max: the greatest value of the element format.
        mode: "floor", "ceil", "even" or "rceil".
        step: for "even".

    Raises:
        ConfigError: `mode` is another one.
    """
    if mode not in MX_MODES:
        raise ConfigError(f"mx_mode={mode!r} is unknown; use one of {', '.join(MX_MODES)}")
    # absmax = m * 2**e with m in [0.5, 1), likewise the element: each mode is a comparison of m.
    m, e = torch.frexp(absmax.to(torch.float32))
    element_m, element_e = math.frexp(element_max)
    exponent = e - element_e
    if mode == "ceil":
        exponent = exponent + (m > 0.5)
    elif mode == "even":
        exponent = exponent + (m >= 1.0 - step / 2.0 ** (element_e + 1))
    elif mode == "rceil":
        exponent = exponent + (m > element_m)
    codes = exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    scale = decode_e8m0(codes.to(torch.uint8))
    scale = torch.where(absmax == 0, 1.0, scale)
    return torch.where(torch.isfinite(absmax), scale, math.nan)


def encode_e8m0(scale: Tensor) -> Tensor:
    """Code (uint8) of each scale, exact for the powers of two from 2**-127 to 2**127.

    Others round to the nearer power, halves up; NaN and infinity give 255.
    """
    return scale.to(torch.float32).to(torch.float8_e8m0fnu).view(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Value (float32) of each code (uint8): 2**(code - 127), and NaN for 255 (MX v1.0)."""
    # Bits of a float32: the exponent alone, but 2**-127 is subnormal and 255 would be infinity.
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, 1 << 22, bits)
    return torch.where(codes == E8M0_NAN, math.nan, bits.view(torch.float32))
