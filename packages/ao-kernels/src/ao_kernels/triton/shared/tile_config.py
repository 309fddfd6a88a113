"""Tile configurations and split-K factors, chosen by rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_kernels.triton.shared.tiling import Tiling
from ao_kernels.triton.tuning.choose import Case, find

__all__ = [
    "FEWEST_TILES",
    "Regime",
    "Setting",
    "described",
    "options",
    "settings_around",
    "splits_of",
    "zero_kind",
]

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


def options(regime: Regime, stages: int, *, early: bool) -> dict[str, Any]:
    """What Triton itself is told; `early`, the kernel may start before the one in front of it has ended."""
    own = {"launch_pdl": True} if early else {}
    return {"num_warps": regime.num_warps, "num_stages": stages, **own}


def described(case: Case[Setting]) -> str:
    """For `explain`: what would serve, and who says so."""
    setting, source = find(case)
    return (
        f"blocks of {setting.rows} rows, {setting.splits} for each sum, {setting.num_stages} stages "
        f"({source})"
    )


def zero_kind(zero_point: Tensor | None) -> str:
    """What tuning knows zero points by, as specs do: "none", "int" or "float"."""
    return "none" if zero_point is None else "int" if zero_point.dtype == torch.uint8 else "float"
