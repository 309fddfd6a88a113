"""PTX of lookup tables (LUT) in registers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["TABLE", "load_table", "table_words"]

#: registers of a kernel that looks numbers up: the words of `table_words`
TABLE = tuple(f"ao_{half}{i}" for half in ("low", "high") for i in range(4))


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
