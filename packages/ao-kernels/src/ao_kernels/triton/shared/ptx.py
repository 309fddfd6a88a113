"""PTX that several kernels hold, as text, which a NumPy model runs: loads, prefetches, arithmetic.

PTX that decodes weights is in `weight_only` and `w4a8`. Every launch asks for its texts, so those of several
lines are cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

__all__ = [
    "AND_OR",
    "AND_XOR",
    "LOAD_BYTE",
    "PREFETCH",
    "SELECT",
    "SUFFIX",
    "block",
    "divide",
    "load_scale",
    "load_zero",
    "multiply_add",
    "ones",
    "pack_float8",
    "refine",
    "round_pair",
]

#: an unsigned byte, as 32 bits
LOAD_BYTE = "ld.global.nc.u8 $0, [$1];"

#: L2 prefetch of 128 bytes at $1
PREFETCH = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"


#: tables of `lop3`: `(a & b) | c` and `(a & b) ^ c`, and `c` with the bits of `a` where those of `b` are set
AND_OR, AND_XOR, SELECT = "0xea", "0x6a", "0xe2"
#: element → what opcodes for two of them end in
SUFFIX = {"bf16": "bf16x2", "fp16": "f16x2"}


def load_scale(bits: int) -> str:
    """A number of 16 or 32 bits."""
    return f"ld.global.nc.b{bits} $0, [$1];"


def load_zero(dtype: torch.dtype) -> str:
    """A zero point: a byte as 32 bits, or a number."""
    return LOAD_BYTE if dtype == torch.uint8 else load_scale(8 * dtype.itemsize)


def block(lines: Iterable[str]) -> str:
    """Lines with registers of their own."""
    return "{\n" + "\n".join(lines) + "\n}"


@lru_cache
def divide(*, saturating: bool = False, sm80: bool = False) -> str:
    """The nearest number to $1 / $2, from the nearest number to 1 / $2 as $3.

    A product, and one step by what is left of $1 (Markstein 1990, doi:10.1147/rd.341.0111): exact where
    that is a normal number, so for quotients from 2**-17 on where $2 is at least 2**-86. `saturating`, any
    beyond 2**20 stays so, infinities too; without it those are NaN. `sm80` does it in two instructions,
    which there are on sm_80 already.
    """
    bound = []
    if saturating:
        bound = ["mov.b32 most, 0x49800000;", "min.NaN.xorsign.abs.f32 first, first, most;"]
    if saturating and sm80:
        bound = [
            "mov.b32 most, 0x49800000;",
            "min.NaN.f32 first, first, most;",
            "mov.b32 most, 0xc9800000;",
            "max.NaN.f32 first, first, most;",
        ]
    return block(
        [
            ".reg .b32 first, rest, most, minus;",
            "mul.rn.f32 first, $1, $3;",
            *bound,
            # the signs are such that -0 stays -0
            "neg.f32 minus, $1;",
            "fma.rn.f32 rest, first, $2, minus;",
            "neg.f32 minus, $3;",
            "fma.rn.f32 $0, rest, minus, first;",
        ]
    )


@lru_cache
def refine() -> str:
    """The nearest number to 1 / $2, from one beside it as $1."""
    return block(
        [
            ".reg .b32 one, rest, minus;",
            "mov.b32 one, 0x3f800000;",
            "neg.f32 minus, $2;",
            "fma.rn.f32 rest, $1, minus, one;",
            "fma.rn.f32 $0, rest, $1, $1;",
        ]
    )


def multiply_add(element: str) -> str:
    """$1 · $2 + $3 of two neighbours in "bf16" or "fp16"."""
    return f"fma.rn.{SUFFIX[element]} $0, $1, $2, $3;"


def round_pair(element: str) -> str:
    """$1 and $2, the first in the lower half, as "bf16" or "fp16"."""
    return f"cvt.rn.{SUFFIX[element]}.f32 $0, $2, $1;"


#: element → the bits of 1, in all of a register
_ONES = {"bf16": 0x3F803F80, "fp16": 0x3C003C00, "int8": 0x01010101, "e4m3": 0x38383838}


def ones(element: str) -> str:
    """1 in "bf16", "fp16", "int8" or "e4m3", as often as a register holds it, whatever $1 and so on are."""
    return f"mov.b32 $0, {_ONES[element]:#010x};"


@lru_cache
def pack_float8(numbers: str) -> str:
    """The codes of $1 to $4 in "e4m3" or "e5m2", the first in the lowest byte."""
    kind = f"cvt.rn.satfinite.{numbers}x2.f32"
    return block(
        [
            ".reg .b16 low, high;",
            f"{kind} low, $2, $1;",
            f"{kind} high, $4, $3;",
            "mov.b32 $0, {low, high};",
        ]
    )
