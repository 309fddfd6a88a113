"""PTX that the kernels hold, as text, which NumPy models run: loads, permutations, arithmetic.

What turns codes into numbers is in `ao_kernels.triton.decoding`, but for 2:4 sparse weights. Every launch
asks for its texts, so those of several lines are made once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

__all__ = [
    "AND_OR",
    "AND_XOR",
    "LOAD_BYTE",
    "PATTERNS",
    "PICK",
    "PREFETCH",
    "SELECT",
    "SUFFIX",
    "TABLE",
    "block",
    "divide",
    "load_scale",
    "load_table",
    "lower_nibbles",
    "pack_float8",
    "refine",
    "round_pair",
    "selector_words",
    "signed_nibbles",
    "table_words",
    "to_float",
    "two_of_four",
    "upper_nibbles",
]

#: an unsigned byte, as 32 bits
LOAD_BYTE = "ld.global.nc.u8 $0, [$1];"

#: 128 bytes at $1 into the second cache
PREFETCH = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"

#: four bytes out of the eight of $1 and $2, as the nibbles of $3 name them
PICK = "prmt.b32 $0, $1, $2, $3;"

#: tables of `lop3`: `(a & b) | c` and `(a & b) ^ c`, and `c` with the bits of `a` where those of `b` are set
AND_OR, AND_XOR, SELECT = "0xea", "0x6a", "0xe2"
#: registers of a kernel that looks numbers up: the words of `table_words`
TABLE = tuple(f"ao_{half}{i}" for half in ("low", "high") for i in range(4))
#: element → what opcodes for two of them end in
SUFFIX = {"bf16": "bf16x2", "fp16": "f16x2"}


def load_scale(bits: int) -> str:
    """A number of 16 or 32 bits."""
    return f"ld.global.nc.b{bits} $0, [$1];"


@lru_cache
def load_table() -> str:
    """Declare registers for the whole kernel, and load a table of `table_words` at $1 into them.

    Were they constants, or loaded from the same address by all threads, the assembler would keep them
    in uniform registers, and copy each before each use: seven more instructions a word.
    """
    return "\n".join(
        [
            f".reg .b32 {', '.join(TABLE)};",
            *(
                f"ld.global.nc.v4.b32 {{{', '.join(TABLE[i : i + 4])}}}, [$1 + {4 * i}];"
                for i in (0, 4)
            ),
            "mov.b32 $0, 0;",
        ]
    )


def table_words(values: Tensor) -> Tensor:
    """int32 [8]: the lower and upper bytes of 16 values of 16 bits, four in a word."""
    return values.view(torch.uint8).view(16, 2).t().reshape(-1).view(torch.int32)


#: the six ways to keep two of four columns: pattern → the first and the second
PATTERNS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def selector_words() -> Tensor:
    """int32 [8]: what `two_of_four` looks up by patterns, for groups of even and of odd number.

    A selector picks the bytes of columns 0, 2, 1 and 3 out of two groups' codes, first and second of either,
    and of a constant, whose byte 4 is that of 0. Its lower and its upper byte have a table each.
    """
    tables = []
    for odd in range(2):
        sources = [[4] * 4 for _ in range(8)]
        for row, (first, second) in zip(sources, PATTERNS, strict=False):
            row[first], row[second] = 2 * odd, 2 * odd + 1
        tables.append([row[0] | row[2] << 4 for row in sources])
        tables.append([row[1] | row[3] << 4 for row in sources])
    return torch.tensor(tables, dtype=torch.uint8).view(-1).view(torch.int32)


@lru_cache
def two_of_four(element: str) -> str:
    """Sixteen planes of code - 8, for eight groups of four columns of which two have a code of 4 bits.

    $16 and $17 have the codes of four groups each, $18 eight patterns (see `Plane24`). Planes 2u and 2u + 1
    are the columns 0, 1 and 2, 3 of group u. Bytes are picked twice: codes by `selector_words`, to where
    their columns are; then beside each the upper byte of 128 (in float16 of 1024), which is subtracted.
    """
    constant, offset = {"bf16": (0x4308, 0xC308), "fp16": (0x6408, 0xE408)}[element]
    one = {"bf16": "0x3f803f80", "fp16": "0x3c003c00"}[element]
    lines = [
        ".reg .b32 constant, one, offset, odd, low, high, selector, four;",
        *(f".reg .b32 codes{i};" for i in range(4)),
        f"mov.b32 constant, {constant:#x};",
        f"mov.b32 one, {one};",
        f"mov.b32 offset, {offset << 16 | offset:#x};",
        "shr.u32 odd, $18, 16;",
    ]
    for half, source in enumerate(("$16", "$17")):
        lines += [
            f"and.b32 codes{2 * half}, {source}, 0x0f0f0f0f;",
            f"shr.u32 codes{2 * half + 1}, {source}, 4;",
            f"and.b32 codes{2 * half + 1}, codes{2 * half + 1}, 0x0f0f0f0f;",
        ]
    for parity, index in enumerate(("$18", "odd")):
        table = TABLE[4 * parity : 4 * parity + 4]
        lines.append(f"prmt.b32 low, {table[0]}, {table[1]}, {index};")
        lines.append(f"prmt.b32 high, {table[2]}, {table[3]}, {index};")
        for t in range(4):
            u = 2 * t + parity
            lines.append(f"prmt.b32 selector, low, high, {t | 4 + t << 4:#x};")
            lines.append(f"prmt.b32 four, codes{u // 2}, constant, selector;")
            lines.append(f"prmt.b32 ${2 * u}, four, constant, 0x5250;")
            lines.append(f"prmt.b32 ${2 * u + 1}, four, constant, 0x5351;")
            for j in (2 * u, 2 * u + 1):
                lines.append(f"fma.rn.{SUFFIX[element]} ${j}, ${j}, one, offset;")
    return block(lines)


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


def round_pair(element: str) -> str:
    """$1 and $2, the first in the lower half, as "bf16" or "fp16"."""
    return f"cvt.rn.{SUFFIX[element]}.f32 $0, $2, $1;"


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
