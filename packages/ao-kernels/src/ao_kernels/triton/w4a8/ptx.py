"""PTX that decodes weights of 4 bits to int8 and e4m3."""

from __future__ import annotations

from functools import lru_cache

from ao_kernels.triton.shared.ptx import block

__all__ = ["lower_nibbles", "signed_nibbles", "to_float", "upper_nibbles"]


@lru_cache
def upper_nibbles() -> str:
    """Eight planes of 16 times a signed code of 4 bits, as int8: four neighbours of each in a register.

    The words are those of `Plane32`, $8 to $11; likewise in the next two.
    """
    lines = [".reg .b32 low;"]
    for i in range(4):
        lines.append(f"shl.b32 low, ${8 + i}, 4;")
        lines.append(f"and.b32 ${2 * i}, low, 0xf0f0f0f0;")
        lines.append(f"and.b32 ${2 * i + 1}, ${8 + i}, 0xf0f0f0f0;")
    return block(lines)


@lru_cache
def lower_nibbles() -> str:
    """Eight planes of 2**-9 times an unsigned code of 4 bits, as e4m3: there these are the least numbers."""
    lines = [".reg .b32 high;"]
    for i in range(4):
        lines.append(f"and.b32 ${2 * i}, ${8 + i}, 0x0f0f0f0f;")
        lines.append(f"shr.u32 high, ${8 + i}, 4;")
        lines.append(f"and.b32 ${2 * i + 1}, high, 0x0f0f0f0f;")
    return block(lines)


@lru_cache
def signed_nibbles() -> str:
    """The same of signed codes whose lower bits are, of negative ones, the magnitude less 1.

    So both the sign and what the magnitude lacks are added where the fourth bit is set: 129 times that.
    """
    lines = [".reg .b32 part, sign, both;", "mov.b32 both, 0x81;"]
    for j in range(8):
        word = f"${8 + j // 2}"
        lines.append(f"shr.u32 sign, {word}, {3 + j % 2 * 4};")
        if j % 2:
            lines.append(f"shr.u32 part, {word}, 4;")
        lines.append(f"and.b32 part, {'part' if j % 2 else word}, 0x07070707;")
        lines.append("and.b32 sign, sign, 0x01010101;")
        lines.append(f"mad.lo.u32 ${j}, sign, both, part;")
    return block(lines)


@lru_cache
def to_float() -> str:
    """An integer of up to 2**22 in magnitude as float32, where the converter is slow, as on sm_80.

    It stands in the last bits of 1.5 · 2**23 plus it.
    """
    lines = [".reg .b32 more;", "mov.b32 more, 0xcb400000;", "add.s32 $0, $1, 0x4b400000;"]
    return block([*lines, "add.rn.f32 $0, $0, more;"])
