"""PTX that turns stored codes into numbers: text, which kernels hold and NumPy models run.

A register holds two neighbouring 16-bit words of a row, and each word two or four codes, one of each
plane. So every output is the pair of numbers that a plane has in both words. The words come as the
operand behind the outputs: $4 behind four, $2 behind two.

Integers come from the exponent: with the bits of a code c below those of 2**7 in bfloat16 (2**10 in
float16), the number 128 + c (1024 + c) is there at once, and what is too much is subtracted, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = [
    "LOAD_BYTE",
    "PICK",
    "PREFETCH",
    "divide",
    "e4m3",
    "integers",
    "load_scale",
    "load_table",
    "lookup",
    "lower_nibbles",
    "nibbles",
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
_AND_OR, _AND_XOR, _SELECT = "0xea", "0x6a", "0xe2"
#: registers of a kernel that looks numbers up: the words of `table_words`
_TABLE = tuple(f"ao_{half}{i}" for half in ("low", "high") for i in range(4))
_SUFFIX = {"bf16": "bf16x2", "fp16": "f16x2"}


def load_scale(bits: int) -> str:
    """A number of 16 or 32 bits."""
    return f"ld.global.nc.b{bits} $0, [$1];"


def nibbles(element: str) -> str:
    """Four planes of code - 8, for codes of 4 bits, as "bf16" or "fp16"."""
    return _block(_nibbles_bf16() if element == "bf16" else _nibbles_fp16())


def _nibbles_bf16() -> list[str]:
    words = ("$4", "w1", "w2", "w3")
    return [
        ".reg .b32 w1, w2, w3, one, offset;",
        "mov.b32 one, 0x3f803f80;",
        "mov.b32 offset, 0xc308c308;",  # -136
        *(f"shr.u32 w{j}, $4, {4 * j};" for j in (1, 2, 3)),
        *(f"lop3.b32 ${j}, {words[j]}, 0x000f000f, 0x43004300, {_AND_OR};" for j in range(4)),
        *(f"fma.rn.bf16x2 ${j}, ${j}, one, offset;" for j in range(4)),
    ]


def _nibbles_fp16() -> list[str]:
    """The upper nibble of a byte is left in place: 1024 + 16c, and a factor of 1/16 undoes that."""
    words = ("$4", "$4", "bytes", "bytes")
    masks, factors = ("0x000f000f", "0x00f000f0"), ("one, low", "sixteenth, high")
    return [
        ".reg .b32 bytes, one, sixteenth, low, high;",
        "mov.b32 one, 0x3c003c00;",
        "mov.b32 sixteenth, 0x2c002c00;",
        "mov.b32 low, 0xe408e408;",  # -1032
        "mov.b32 high, 0xd480d480;",  # -72
        "shr.u32 bytes, $4, 8;",
        *(f"lop3.b32 ${j}, {words[j]}, {masks[j % 2]}, 0x64006400, {_AND_OR};" for j in range(4)),
        *(f"fma.rn.f16x2 ${j}, ${j}, {factors[j % 2]};" for j in range(4)),
    ]


def integers(element: str) -> str:
    """Two planes of code - 128, for codes of 8 bits."""
    lines = [".reg .b32 high, top, one, offset;", "shr.u32 high, $2, 8;"]
    words = ("$2", "high")
    if element == "fp16":
        lines += ["mov.b32 one, 0x3c003c00;", "mov.b32 offset, 0xe480e480;"]  # -1152
        for j in range(2):
            lines.append(f"lop3.b32 ${j}, {words[j]}, 0x00ff00ff, 0x64006400, {_AND_OR};")
            lines.append(f"fma.rn.f16x2 ${j}, ${j}, one, offset;")
        return _block(lines)
    # bfloat16 has room for seven bits: 128 + those, less 256, or less 128 where the eighth is set
    lines.append("mov.b32 one, 0xbf80bf80;")  # -1
    for j in range(2):
        lines.append(f"lop3.b32 ${j}, {words[j]}, 0x007f007f, 0x43004300, {_AND_OR};")
        lines.append(f"lop3.b32 top, {words[j]}, 0x00800080, 0x43804380, {_AND_XOR};")
        lines.append(f"fma.rn.bf16x2 ${j}, top, one, ${j};")
    return _block(lines)


def e4m3(element: str) -> str:
    """Two planes of float8 e4m3: exponent and mantissa moved into place, then a power of two.

    NaN becomes ±480. A block with NaN in it has the scale NaN, so that products do not see the difference.
    """
    shifts, mask, factor = {
        "bf16": (("shl.b32 part, $2, 4;", "shr.u32 part, $2, 4;"), "0x07f007f0", "0x7b807b80"),
        "fp16": (("shl.b32 part, $2, 7;", "shr.u32 part, $2, 1;"), "0x3f803f80", "0x5c005c00"),
    }[element]
    lines = [".reg .b32 low, part, factor, zero;", "shl.b32 low, $2, 8;"]
    lines += [f"mov.b32 factor, {factor};", "mov.b32 zero, 0x80008000;"]  # -0 keeps the sign of 0
    for j, word in enumerate(("low", "$2")):
        lines += [shifts[j], f"and.b32 part, part, {mask};"]
        lines.append(f"lop3.b32 ${j}, {word}, 0x80008000, part, {_AND_OR};")
        lines.append(f"fma.rn.{_SUFFIX[element]} ${j}, ${j}, factor, zero;")
    return _block(lines)


def load_table() -> str:
    """Declare registers for the whole kernel, and load a table of `table_words` at $1 into them.

    Were they constants, or loaded from the same address by all threads, the assembler would keep them
    in uniform registers, and copy each before each use: seven more instructions a word.
    """
    return "\n".join(
        [
            f".reg .b32 {', '.join(_TABLE)};",
            *(
                f"ld.global.nc.v4.b32 {{{', '.join(_TABLE[i : i + 4])}}}, [$1 + {4 * i}];"
                for i in (0, 4)
            ),
            "mov.b32 $0, 0;",
        ]
    )


def table_words(values: Tensor) -> Tensor:
    """int32 [8]: the lower and upper bytes of 16 values of 16 bits, four in a word."""
    return values.view(torch.uint8).view(16, 2).t().reshape(-1).view(torch.int32)


def lookup(element: str) -> str:
    """Four planes of the values in the table, rounded to nearest, for codes of 4 bits.

    The codes of two words lie in the order of their use: those of plane j are nibbles 2j and 2j + 1.

    `prmt` picks four bytes out of eight by the lower three bits of four codes; done for either half of
    the values, and for their lower and upper bytes, and then selected by the fourth bits.
    """
    lines = [
        ".reg .b32 codes, signs, mask, low, high, other;",
        "and.b32 codes, $4, 0x77777777;",
        "shl.b32 signs, $4, 4;",
    ]
    for word, order in enumerate(("0xd9c8", "0xfbea")):
        # bytes of all ones where the fourth bit is set: that of nibble 0 is now the sign of byte 0, …
        lines.append(f"prmt.b32 mask, signs, $4, {order};")
        for half, table in (("low", _TABLE[:4]), ("high", _TABLE[4:])):
            lines.append(f"prmt.b32 {half}, {table[0]}, {table[1]}, codes;")
            lines.append(f"prmt.b32 other, {table[2]}, {table[3]}, codes;")
            lines.append(f"lop3.b32 {half}, other, mask, {half}, {_SELECT};")
        lines.append(f"prmt.b32 ${2 * word}, low, high, 0x5140;")
        lines.append(f"prmt.b32 ${2 * word + 1}, low, high, 0x7362;")
        if word == 0:
            lines.append("shr.u32 codes, codes, 16;")
    return _block(lines)


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
        table = _TABLE[4 * parity : 4 * parity + 4]
        lines.append(f"prmt.b32 low, {table[0]}, {table[1]}, {index};")
        lines.append(f"prmt.b32 high, {table[2]}, {table[3]}, {index};")
        for t in range(4):
            u = 2 * t + parity
            lines.append(f"prmt.b32 selector, low, high, {t | 4 + t << 4:#x};")
            lines.append(f"prmt.b32 four, codes{u // 2}, constant, selector;")
            lines.append(f"prmt.b32 ${2 * u}, four, constant, 0x5250;")
            lines.append(f"prmt.b32 ${2 * u + 1}, four, constant, 0x5351;")
            for j in (2 * u, 2 * u + 1):
                lines.append(f"fma.rn.{_SUFFIX[element]} ${j}, ${j}, one, offset;")
    return _block(lines)


def upper_nibbles() -> str:
    """Eight planes of 16 times a signed code of 4 bits, as int8: four neighbours of each in a register.

    The words are those of `Plane32`, $8 to $11; likewise in the next two.
    """
    lines = [".reg .b32 low;"]
    for i in range(4):
        lines.append(f"shl.b32 low, ${8 + i}, 4;")
        lines.append(f"and.b32 ${2 * i}, low, 0xf0f0f0f0;")
        lines.append(f"and.b32 ${2 * i + 1}, ${8 + i}, 0xf0f0f0f0;")
    return _block(lines)


def lower_nibbles() -> str:
    """Eight planes of 2**-9 times an unsigned code of 4 bits, as e4m3: there these are the least numbers."""
    lines = [".reg .b32 high;"]
    for i in range(4):
        lines.append(f"and.b32 ${2 * i}, ${8 + i}, 0x0f0f0f0f;")
        lines.append(f"shr.u32 high, ${8 + i}, 4;")
        lines.append(f"and.b32 ${2 * i + 1}, high, 0x0f0f0f0f;")
    return _block(lines)


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
    return _block(lines)


def to_float() -> str:
    """An integer of up to 2**22 in magnitude as float32, where the converter is slow, as on sm_80.

    It stands in the last bits of 1.5 · 2**23 plus it.
    """
    lines = [".reg .b32 more;", "mov.b32 more, 0xcb400000;", "add.s32 $0, $1, 0x4b400000;"]
    return _block([*lines, "add.rn.f32 $0, $0, more;"])


def _block(lines: Iterable[str]) -> str:
    return "{\n" + "\n".join(lines) + "\n}"


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
    return _block(
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


def refine() -> str:
    """The nearest number to 1 / $2, from one beside it as $1."""
    return _block(
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
    return f"cvt.rn.{_SUFFIX[element]}.f32 $0, $2, $1;"


def pack_float8(numbers: str) -> str:
    """The codes of $1 to $4 in "e4m3" or "e5m2", the first in the lowest byte."""
    kind = f"cvt.rn.satfinite.{numbers}x2.f32"
    return _block(
        [
            ".reg .b16 low, high;",
            f"{kind} low, $2, $1;",
            f"{kind} high, $4, $3;",
            "mov.b32 $0, {low, high};",
        ]
    )
