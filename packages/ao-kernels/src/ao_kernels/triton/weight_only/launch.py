"""How the kernels of `plane16` are specialized for a call: what is launched, and what proofs compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_kernels.triton.shared.device import capability, processors, shared_memory
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.ptx import LOAD_BYTE, PREFETCH, load_scale
from ao_kernels.triton.shared.tile_config import (
    FEWEST_TILES,
    Regime,
    Setting,
    options,
    settings_around,
    splits_of,
)
from ao_kernels.triton.shared.tiling import COLS, Tiling
from ao_kernels.triton.tuning.choose import Case
from ao_kernels.triton.tuning.store import Problem, bucket
from ao_kernels.triton.weight_only.formats import TABLES, Format
from ao_kernels.triton.weight_only.lut_ptx import load_table
from ao_kernels.triton.weight_only.scales import KINDS, load_bytes

__all__ = [
    "REGIMES",
    "ahead",
    "arguments",
    "case_of",
    "constants",
    "regime_of",
    "rule",
    "settings_of",
    "stages_of",
]


#: with more rows than the last has, several blocks share the columns
REGIMES = (Regime(16, 4, 4), Regime(32, 4, 4), Regime(64, 8, 3))


def regime_of(m: int) -> Regime:
    """The smallest regime that takes m rows in one block, or the largest."""
    return next((regime for regime in REGIMES if m <= regime.rows), REGIMES[-1])


def stages_of(fmt: Format, tiles: Tiling, regime: Regime, shared: int) -> int:
    """A regime's stages, or as many fewer as do not fit: all but one are in `shared` bytes."""
    stage = 2 * (COLS * tiles.plane * fmt.words + tiles.width * regime.rows)
    return max(2, min(regime.num_stages, shared // stage + 1))


def rule(tiles: Tiling, m: int, processors: int) -> Setting:
    """What serves m rows where nothing was measured."""
    regime = regime_of(m)
    return Setting(*regime, splits_of(tiles, -(-m // regime.rows), processors))


def settings_of(tiles: Tiling, m: int, processors: int) -> tuple[Setting, ...]:
    """What may serve any number of rows whose bucket is that of m."""
    return settings_around(rule(tiles, bucket(m), processors), tiles.tiles // FEWEST_TILES)


@lru_cache(maxsize=4096)
def case_of(
    numbers: str,
    tiles: Tiling,
    group: int,
    x_dtype: torch.dtype,
    scale: str,
    zero_point: str,
    m: int,
    device: torch.device,
    *,
    sparse: bool,
) -> Case[Setting]:
    """What settings are chosen for; `scale` as in `scales.name_of`, `zero_point` "none", "int" or "float"."""
    kept = "2:4" if sparse else "dense"
    facts = (numbers, kept, group, x_dtype, scale, zero_point)
    problem, there = (
        Problem("plane16_linear", facts, tiles.n, tiles.k, bucket(m)),
        processors(device),
    )
    return Case(problem, device, rule(tiles, m, there), lambda: settings_of(tiles, m, there))


def loads_of(scale_dtype: torch.dtype, tiles: Tiling, *, sm80: bool) -> str:
    """The assembly that loads a scale, or as many as possible of those that lie beside each other."""
    if scale_dtype not in KINDS:
        return load_scale(8 * scale_dtype.itemsize)
    count = next(count for count in (4, 2, 1) if tiles.beside % count == 0)
    return load_bytes(KINDS[scale_dtype], count, sm80=sm80)


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
    outer: bool = False,
    sm80: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of the function `product`; without `assembly` plain operations serve.

    `outer`, scales have one themselves; `sm80`, the device has no conversions of float8.
    """
    load_zero = None
    if zero_dtype is not None:
        load_zero = LOAD_BYTE if zero_dtype == torch.uint8 else load_scale(8 * zero_dtype.itemsize)
    return {
        "ROWS": regime.rows,
        "COLS": COLS,
        "WORDS": fmt.words,
        "PLANES": tiles.planes,
        "PLANE": tiles.plane,
        "CHAIN": tiles.chain,
        "OFFSET": fmt.offset,
        "ORDER": fmt.order,
        "SPARSE": fmt.sparse,
        "SPLITS": splits,
        "SCALE": KINDS.get(scale_dtype),
        "HAS_OUTER": outer,
        "HAS_ZERO": zero_dtype is not None,
        "HAS_BIAS": bias,
        "EVEN_K": tiles.k % tiles.width == 0,
        "ASM": fmt.assembly(ELEMENTS[x_dtype]) if assembly else None,
        "LOAD_SCALE": loads_of(scale_dtype, tiles, sm80=sm80) if assembly else None,
        "LOAD_ZERO": load_zero if assembly else None,
        "LOAD_TABLE": load_table() if assembly and (fmt.looked_up or fmt.sparse) else None,
        "TABLE": len(fmt.values) + 16 * TABLES.index(x_dtype),
    }


def ahead(regime: Regime, *, early: bool) -> dict[str, Any]:
    """Those of the kernel `linear` beside; `early`, it may start before the one in front of it has ended."""
    return {"PREFETCH": PREFETCH, "AHEAD": regime.num_stages if early else 0}


def arguments(
    x: Tensor,
    fmt: Format,
    tiles: Tiling,
    regime: Regime,
    splits: int,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    *,
    bias: bool,
    early: bool,
) -> dict[str, Any]:
    """What one weight's product and that of experts are launched with alike: `constants` and `options`."""
    return constants(
        fmt, tiles, regime, splits, x.dtype, scale.dtype,
        None if zero_point is None else zero_point.dtype, bias,
        assembly=x.is_cuda, outer=outer is not None, sm80=capability(x.device) < (8, 9),
    ) | options(regime, stages_of(fmt, tiles, regime, shared_memory(x.device)), early=early)  # fmt: skip
