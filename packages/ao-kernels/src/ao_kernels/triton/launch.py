"""How the kernels of `plane16` are specialized for a call: what is launched, and what proofs compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_kernels.triton.assembly import LOAD_BYTE, PREFETCH, load_scale, load_table
from ao_kernels.triton.formats import TABLES, Format
from ao_kernels.triton.plane16 import COLS, Tiling
from ao_kernels.triton.scales import KINDS, load_bytes
from ao_kernels.triton.support import capability, processors, shared_memory
from ao_kernels.triton.tuning.choose import Case, find
from ao_kernels.triton.tuning.records import Problem, bucket

__all__ = [
    "ELEMENTS",
    "FEWEST_TILES",
    "POINTERS",
    "REGIMES",
    "Regime",
    "Setting",
    "ahead",
    "arguments",
    "case_of",
    "constants",
    "described",
    "options",
    "regime_of",
    "rule",
    "settings_around",
    "settings_of",
    "splits_of",
    "stages_of",
    "zero_kind",
]

#: dtypes of activations, as the assembly calls them
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: dtypes of tensors, as signatures of kernels call them
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    **dict.fromkeys(KINDS, "*u8"),
}
#: tiles of a row that each of several blocks gets at least
FEWEST_TILES = 4
#: blocks that a row of tiles is split among at most
_MOST_SPLITS = 8


class Regime(NamedTuple):
    """How a block is built for products with up to `rows` rows of activations."""

    rows: int
    num_warps: int
    num_stages: int


class Setting(NamedTuple):
    """A regime, and among how many blocks each row of tiles is split."""

    rows: int
    num_warps: int
    num_stages: int
    splits: int

    @property
    def regime(self) -> Regime:
        """How each block is built."""
        return Regime(*self[:3])


#: with more rows than the last has, several blocks share the columns
REGIMES = (Regime(16, 4, 4), Regime(32, 4, 4), Regime(64, 8, 3))


def regime_of(m: int) -> Regime:
    """The smallest regime that takes m rows in one block, or the largest."""
    return next((regime for regime in REGIMES if m <= regime.rows), REGIMES[-1])


def splits_of(tiles: Tiling, row_blocks: int, processors: int) -> int:
    """Among how many blocks a row of tiles is split, so that every processor has one."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and tiles.blocks * row_blocks * splits < 0.9 * processors
        and tiles.tiles >= 2 * splits * FEWEST_TILES
    ):
        splits *= 2
    return splits


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


def settings_around(first: Setting, most: int) -> tuple[Setting, ...]:
    """At most four: a setting, one stage fewer, so that more blocks share a processor, and other splits.

    Those are twice as many, if `most` allows it, and half.
    """
    found = [first, first._replace(num_stages=first.num_stages - 1)]
    if 2 * first.splits <= min(most, _MOST_SPLITS):
        found.append(first._replace(splits=2 * first.splits))
    if first.splits > 1:
        found.append(first._replace(splits=first.splits // 2))
    return tuple(found)


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


def zero_kind(zero_point: Tensor | None) -> str:
    """What tuning knows zero points by, as specs do: "none", "int" or "float"."""
    return "none" if zero_point is None else "int" if zero_point.dtype == torch.uint8 else "float"


def described(case: Case[Setting]) -> str:
    """For `explain`: what would serve, and who says so."""
    setting, source = find(case)
    return (
        f"blocks of {setting.rows} rows, {setting.splits} for each sum, {setting.num_stages} stages "
        f"({source})"
    )


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


def options(regime: Regime, stages: int, *, early: bool) -> dict[str, Any]:
    """What Triton itself is told; `early`, the kernel may start before the one in front of it has ended."""
    own = {"launch_pdl": True} if early else {}
    return {"num_warps": regime.num_warps, "num_stages": stages, **own}


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
