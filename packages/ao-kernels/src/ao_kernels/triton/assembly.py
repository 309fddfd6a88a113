"""PTX that turns stored codes into numbers: text, which kernels hold and NumPy models run.

A register holds two neighbouring 16-bit words of a row, and each word four codes, one of each plane.
So every output is the pair of numbers that a plane has in both words.

The numbers come from the exponent: with the bits of a code c below those of 2**7 in bfloat16 (2**10 in
float16), the number 128 + c (1024 + c) is there at once, and 128 + 8 is then subtracted.
"""

from __future__ import annotations

__all__ = ["LOAD_BYTE", "load_scale", "nibbles"]

#: an unsigned byte, as 32 bits
LOAD_BYTE = "ld.global.nc.u8 $0, [$1];"

#: `(a & b) | c` as the table of `lop3`
_AND_OR = "0xea"


def load_scale(bits: int) -> str:
    """A number of 16 or 32 bits."""
    return f"ld.global.nc.b{bits} $0, [$1];"


def nibbles(element: str) -> str:
    """Words ($4) to four pairs ($0 to $3) of code - 8 as "bf16" or "fp16"."""
    lines = _bf16() if element == "bf16" else _fp16()
    return "{\n" + "\n".join(lines) + "\n}"


def _bf16() -> list[str]:
    words = ("$4", "w1", "w2", "w3")
    return [
        ".reg .b32 w1, w2, w3, one, offset;",
        "mov.b32 one, 0x3f803f80;",
        "mov.b32 offset, 0xc308c308;",  # -136
        *(f"shr.u32 w{j}, $4, {4 * j};" for j in (1, 2, 3)),
        *(f"lop3.b32 ${j}, {words[j]}, 0x000f000f, 0x43004300, {_AND_OR};" for j in range(4)),
        *(f"fma.rn.bf16x2 ${j}, ${j}, one, offset;" for j in range(4)),
    ]


def _fp16() -> list[str]:
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
