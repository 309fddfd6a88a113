"""PTX that decodes 2:4 sparse weights in int4."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ao_kernels.triton.shared.ptx import SUFFIX, block
from ao_kernels.triton.weight_only.lut_ptx import TABLE

__all__ = ["PATTERNS", "selector_words", "two_of_four"]

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
