"""How the kernels of `plane16` are specialized for a call: what is launched, and what proofs compile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ao_kernels.triton.assembly import LOAD_BYTE, PREFETCH, load_scale, load_table
from ao_kernels.triton.formats import TABLES, Format
from ao_kernels.triton.plane16 import COLS, Tiling

__all__ = [
    "ELEMENTS",
    "POINTERS",
    "REGIMES",
    "Regime",
    "ahead",
    "constants",
    "regime_of",
    "splits_of",
]

#: dtypes of activations, as the assembly calls them
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: dtypes of tensors, as signatures of kernels call them
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
}
#: tiles of a row that each of several blocks gets at least
_FEWEST_TILES = 4


class Regime(NamedTuple):
    """How a block is built for products with up to `rows` rows of activations."""

    rows: int
    num_warps: int
    num_stages: int


#: with more rows than the last has, several blocks share the columns
REGIMES = (Regime(16, 4, 4), Regime(32, 4, 4), Regime(64, 8, 3))


def regime_of(m: int) -> Regime:
    """The smallest regime that takes m rows in one block, or the largest."""
    return next((regime for regime in REGIMES if m <= regime.rows), REGIMES[-1])


def splits_of(tiles: Tiling, row_blocks: int, processors: int) -> int:
    """Among how many blocks a row of tiles is split, so that every processor has one."""
    splits = 1
    while (
        splits < 8
        and tiles.blocks * row_blocks * splits < 0.9 * processors
        and tiles.tiles >= 2 * splits * _FEWEST_TILES
    ):
        splits *= 2
    return splits


def constants(
    fmt: Format,
    tiles: Tiling,
    regime: Regime,
    splits: int,
    x_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    zero_dtype: torch.dtype | None,
    bias: bool,
    *,
    assembly: bool = True,
) -> dict[str, Any]:
    """The compile-time arguments of the function `product`; without `assembly` plain operations serve."""
    load_zero = None
    if zero_dtype is not None:
        load_zero = LOAD_BYTE if zero_dtype == torch.uint8 else load_scale(8 * zero_dtype.itemsize)
    return {
        "ROWS": regime.rows,
        "COLS": COLS,
        "PLANES": tiles.planes,
        "PLANE": tiles.plane,
        "CHAIN": tiles.chain,
        "OFFSET": fmt.offset,
        "PAIRS": fmt.looked_up,
        "SPARSE": fmt.sparse,
        "SPLITS": splits,
        "HAS_ZERO": zero_dtype is not None,
        "HAS_BIAS": bias,
        "EVEN_K": tiles.k % tiles.width == 0,
        "ASM": fmt.assembly(ELEMENTS[x_dtype]) if assembly else None,
        "LOAD_SCALE": load_scale(8 * scale_dtype.itemsize) if assembly else None,
        "LOAD_ZERO": load_zero if assembly else None,
        "LOAD_TABLE": load_table() if assembly and (fmt.looked_up or fmt.sparse) else None,
        "TABLE": len(fmt.values) + 16 * TABLES.index(x_dtype),
    }


def ahead(regime: Regime, *, early: bool) -> dict[str, Any]:
    """Those of the kernel `linear` beside; `early`, it may start before the one in front of it has ended."""
    return {"PREFETCH": PREFETCH, "AHEAD": regime.num_stages if early else 0}
