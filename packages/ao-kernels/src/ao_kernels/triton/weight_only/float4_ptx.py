"""Floats of 4 bits without a table: sign, exponent and mantissa are moved into place, a code at once.

A register holds codes of four planes for two columns, and each plane becomes a pair of numbers. Where the
bits of codes lie is chosen for bfloat16: of three planes, one rotation and one mask bring all of them to
where a number has its sign, exponent and mantissa, and the fourth takes two of each. In float16, whose
exponents begin elsewhere, signs and the rest move apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, reduce
from math import frexp
from operator import or_

import torch
from torch import Tensor

__all__ = ["PLACES", "float4", "gather_bits", "mantissa_of", "spread_bits"]

#: of each plane, where the bits of its code lie in a register, from the lowest on, for the first column;
#: for the second one 16 places further on, those beyond the register from its beginning. Found by trying all
PLACES = ((14, 7, 8, 15), (4, 5, 6, 13), (0, 1, 2, 9), (10, 11, 12, 19))
#: the table of `lop3` for `(a & b) | c`
_AND_OR = "0xea"
#: element → its suffix, bits of a mantissa, the offset of exponents
_ELEMENTS = {"bf16": ("bf16x2", 7, 127), "fp16": ("f16x2", 10, 15)}


@lru_cache
def float4(element: str, mantissa: int, least: float) -> str:
    """Four planes of floats with so many bits of mantissa, as "bf16" or "fp16"; `least`, that of code 1.

    What is moved has the exponent's bits as they are, and so is a power of two too small, or subnormal where
    those are 0: a product makes up for both.
    """
    suffix, bits, offset = _ELEMENTS[element]
    # code 1 is 2**(1 - offset - mantissa) when it is moved
    factor = (2 * offset - 1 + mantissa + frexp(least)[1] - 1) << bits
    targets = (*range(bits - mantissa, bits - mantissa + 3), 15)
    masks: list[
        dict[int, int]
    ] = []  # of each plane: how far to rotate → bits that are then in place
    for places in PLACES:
        found: dict[int, int] = {}
        for place, target in zip(places, targets, strict=True):
            turn = (target - place) % 32
            found[turn] = found.get(turn, 0) | 0x10001 << target
        masks.append(found)
    turns = {turn for found in masks for turn in found}
    wanted = {
        turn: reduce(or_, (found.get(turn, 0) for found in masks)) for turn in sorted(turns - {0})
    }
    lines = [
        f".reg .b32 factor, zero{''.join(f', turned{turn}' for turn in wanted)};",
        f"mov.b32 factor, {factor << 16 | factor:#x};",
        "mov.b32 zero, 0x80008000;",  # -0 keeps the sign of 0
        *(_turned(turn, mask) for turn, mask in wanted.items()),
    ]
    for plane, found in enumerate(masks):
        for number, (turn, mask) in enumerate(found.items()):
            source = f"turned{turn}" if turn else "$4"
            if number == 0:
                lines.append(f"and.b32 ${plane}, {source}, {mask:#x};")
            else:
                lines.append(f"lop3.b32 ${plane}, {source}, {mask:#x}, ${plane}, {_AND_OR};")
        lines.append(f"fma.rn.{suffix} ${plane}, ${plane}, factor, zero;")
    return "\n".join(["{", *lines, "}"])


def _turned(turn: int, mask: int) -> str:
    """The word rotated to the left; by a shift, for which there are more units, where `mask` allows it."""
    if mask & (1 << turn) - 1 == 0:
        return f"shl.b32 turned{turn}, $4, {turn};"
    if mask >> turn == 0:
        return f"shr.u32 turned{turn}, $4, {32 - turn};"
    return f"shf.l.wrap.b32 turned{turn}, $4, $4, {turn};"


def mantissa_of(values: tuple[float, ...]) -> int | None:
    """Bits of mantissa of the float that has these values, codes 8 and up being the negative ones."""
    if frexp(values[1])[0] != 0.5:
        return None
    for mantissa in range(3):
        one = 1 << mantissa
        # in units of code 1, from the second one of which exponents count
        steps = [
            code if code < one else (one + code % one) * 2.0 ** (code // one - 1)
            for code in range(8)
        ]
        if values == tuple(sign * values[1] * step for sign in (1, -1) for step in steps):
            return mantissa
    return None


def spread_bits(words: Tensor) -> Tensor:
    """int16 (…, 2n) with code j in bits 4j to 4j + 3 → with the bits of all codes in `PLACES`."""
    words = words.long() & 0xFFFF
    codes = torch.arange(1 << 16, device=words.device)
    moved = torch.zeros_like(codes)
    for bit, place in _places():
        moved |= (codes >> bit & 1) << place
    first, second = moved[words[..., ::2]], moved[words[..., 1::2]]
    # half a register further on is the other half
    halves = (first & 0xFFFF | second >> 16, first >> 16 | second & 0xFFFF)
    return torch.stack(halves, -1).to(torch.int16).flatten(-2)


def gather_bits(words: Tensor) -> Tensor:
    """Inverse of `spread_bits`."""
    own = words.long() & 0xFFFF
    other = own.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    bits = torch.arange(1 << 16, device=words.device)
    from_own, from_other = torch.zeros_like(bits), torch.zeros_like(bits)
    for bit, place in _places():
        part = from_own if place < 16 else from_other
        part |= (bits >> place % 16 & 1) << bit
    return (from_own[own] | from_other[other]).to(torch.int16)


def _places() -> Iterator[tuple[int, int]]:
    """Of every bit of a word of four codes, that and its place."""
    return enumerate(place for plane in PLACES for place in plane)
