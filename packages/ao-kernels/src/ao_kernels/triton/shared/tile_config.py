"""Tile configurations and split-K factors, chosen by rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_kernels.triton.shared.tiling import Tiling
from ao_kernels.triton.tuning.choose import Case, find

__all__ = [
    "FEWEST_TILES",
    "LaunchConfig",
    "TileConfig",
    "described",
    "launch_configs_around",
    "options",
    "splits_of",
    "zero_kind",
]

#: tiles along K that each split of K has at least
FEWEST_TILES = 4
#: most splits of K
_MOST_SPLITS = 8


class TileConfig(NamedTuple):
    """The tile of a CTA: its M, with N and K fixed by the layout; its warps, and stages of the pipeline."""

    block_m: int
    num_warps: int
    num_stages: int


class LaunchConfig(NamedTuple):
    """A `TileConfig`, and the number of splits of K (split-K)."""

    block_m: int
    num_warps: int
    num_stages: int
    splits: int

    @property
    def config(self) -> TileConfig:
        """The tile of each CTA."""
        return TileConfig(*self[:3])


def splits_of(tiles: Tiling, m_tiles: int, sm_count: int) -> int:
    """The number of splits of K that gives every SM a CTA, as long as each split has `FEWEST_TILES`."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and tiles.n_tiles * m_tiles * splits < 0.9 * sm_count
        and tiles.k_tiles >= 2 * splits * FEWEST_TILES
    ):
        splits *= 2
    return splits


def launch_configs_around(first: LaunchConfig, most: int) -> tuple[LaunchConfig, ...]:
    """At most four: a configuration; with one stage fewer, so that more CTAs share an SM; with other splits.

    Those are twice as many, if `most` allows it, and half.
    """
    found = [first, first._replace(num_stages=first.num_stages - 1)]
    if 2 * first.splits <= min(most, _MOST_SPLITS):
        found.append(first._replace(splits=2 * first.splits))
    if first.splits > 1:
        found.append(first._replace(splits=first.splits // 2))
    return tuple(found)


def options(config: TileConfig, stages: int, *, pdl: bool) -> dict[str, Any]:
    """The launch options of Triton; `pdl`, with programmatic dependent launch."""
    own = {"launch_pdl": True} if pdl else {}
    return {"num_warps": config.num_warps, "num_stages": stages, **own}


def described(case: Case[LaunchConfig]) -> str:
    """For `explain`: what would serve, and who says so."""
    setting, source = find(case)
    return (
        f"tiles of {setting.block_m} rows, split-K {setting.splits}, {setting.num_stages} stages "
        f"({source})"
    )


def zero_kind(zero_point: Tensor | None) -> str:
    """What tuning knows zero points by, as specs do: "none", "int" or "float"."""
    return "none" if zero_point is None else "int" if zero_point.dtype == torch.uint8 else "float"
