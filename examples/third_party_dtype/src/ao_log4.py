"""`log4`: a 4-bit format whose magnitudes are powers of the square root of two.

A weight and its code differ by the same *ratio* everywhere, as with a float that has no mantissa but
an exponent in half steps. Eight values below zero and seven above, and zero itself:
0, ±2**(-k / 2) for k = 0 … 6, and -2**(-7 / 2).
"""

from __future__ import annotations

from collections.abc import Iterable

from ao_core import DType, hookimpl, lut_dtype

POSITIVE = [2.0 ** (-k / 2) for k in range(7)]
NEGATIVE = [-(2.0 ** (-k / 2)) for k in range(8)]


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao's plugin API that this was written for."""
    return (0, 1)


@hookimpl
def ao_dtypes() -> Iterable[DType]:
    """The number format; packing, kernels, compile, saving and sharding come with it."""
    return [lut_dtype("log4", sorted([*NEGATIVE, 0.0, *POSITIVE]))]
