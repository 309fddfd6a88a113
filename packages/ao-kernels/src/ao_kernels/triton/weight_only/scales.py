"""Scales of 8 bits in planes: how they are stored, and the PTX that loads them as float32.

A thread needs the scales of a row and a tile one after the other. So they lie beside each other, and one
load brings up to four, which are decoded in pairs of 16-bit numbers, exactly.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ao_core import WHOLE, Spec

__all__ = ["KINDS", "load_bytes", "unfit_scale"]

#: dtype of a scale of 8 bits → what kernels call it
KINDS = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}
#: scales of a load → its type
_LOADS = {1: "u8", 2: "u16", 4: "b32"}
#: the table of `lop3` for `(a & b) | c`
_AND_OR = "0xea"


def unfit_scale(scale: str | Spec) -> str | None:
    """Why planes cannot hold such scales."""
    if isinstance(scale, str):
        return None
    plain = Spec("f8e4m3", scale.block)
    if scale != plain or len(scale.block) < 2 or any(extent != WHOLE for extent in scale.block):
        return (
            f"holds quantized scales only as f8e4m3 with one float32 scale for all, found {scale}"
        )
    return None


@lru_cache
def load_bytes(kind: str, count: int, *, sm80: bool = False) -> str:
    """One, two or four neighbouring scales, "e8m0" or "e4m3", in as many outputs, from the address behind.

    `sm80` does without the conversion of e4m3 that there is from sm_89 on.
    """
    load = f"ld.global.nc.{_LOADS[count]} word, [${count}];"
    if kind == "e8m0":
        lines = _one_power() if count == 1 else _powers(count)
    else:
        lines = _floats_sm80(count) if sm80 else _floats(count)
    return "\n".join(["{", ".reg .b32 word;", load, *lines, "}"])


def _one_power() -> list[str]:
    """2**(code - 127): the code as an exponent, 0 a subnormal number, 255 NaN.

    With half of the least exponent added, the bits are 1.5 · 2**(code - 127) but for 0 and 255, for which
    they are what is wanted; then half of the power is subtracted, which there is 0 and infinity.
    """
    return [
        ".reg .b32 power, more, half;",
        "mov.b32 half, 0xbf000000;",  # -0.5
        "shl.b32 power, word, 23;",
        "or.b32 more, power, 0x00400000;",
        "fma.rn.f32 $0, power, half, more;",
    ]


def _powers(count: int) -> list[str]:
    """`_one_power` for two at a time, in bfloat16."""
    lines = [".reg .b32 power, more, half;", "mov.b32 half, 0xbf00bf00;"]  # -0.5
    for first, move in ((0, "shl.b32 power, word, 7;"), (1, "shr.u32 power, word, 1;")):
        lines += [
            move,
            "and.b32 power, power, 0x7f807f80;",
            "or.b32 more, power, 0x00400040;",
            "fma.rn.bf16x2 power, power, half, more;",
            f"shl.b32 ${first}, power, 16;",
        ]
        if count == 4:
            lines.append(f"and.b32 ${first + 2}, power, 0xffff0000;")
    return lines


def _floats(count: int) -> list[str]:
    lines = [".reg .b16 low, high, first, second;", ".reg .b32 pair;", "mov.b32 {low, high}, word;"]
    for i, half in enumerate(("low", "high")[: max(count // 2, 1)]):
        lines.append(f"cvt.rn.f16x2.e4m3x2 pair, {half};")
        lines += _halves(2 * i, 2 * i + 1 if count > 1 else None)
    return lines


def _floats_sm80(count: int) -> list[str]:
    """Moved into place, times 2**8; what would be ±480 is NaN: times 140 it is infinite, and 448 is not."""
    lines = [
        ".reg .b16 first, second;",
        ".reg .b32 pair, part, over, one, many, zero, nothing;",
        "mov.b32 one, 0x5c005c00;",  # 2**8
        "mov.b32 many, 0x58605860;",  # 140
        "mov.b32 zero, 0x80008000;",  # -0 keeps the sign of 0
        "mov.b32 nothing, 0x00000000;",
    ]
    for i, move in enumerate(("shl.b32 pair, word, 8;", "mov.b32 pair, word;")[:count]):
        lines += [
            move,
            "shr.u32 part, pair, 1;",
            "and.b32 part, part, 0x3f803f80;",
            f"lop3.b32 pair, pair, 0x80008000, part, {_AND_OR};",
            "fma.rn.f16x2 pair, pair, one, zero;",
            "fma.rn.f16x2 over, pair, many, zero;",
            "fma.rn.f16x2 pair, over, nothing, pair;",
        ]
        lines += _halves(i, i + 2 if count == 4 else None)
    return lines


def _halves(first: int, second: int | None) -> list[str]:
    """Both halves of `pair` in float32."""
    lines = ["mov.b32 {first, second}, pair;", f"cvt.f32.f16 ${first}, first;"]
    return lines if second is None else [*lines, f"cvt.f32.f16 ${second}, second;"]
