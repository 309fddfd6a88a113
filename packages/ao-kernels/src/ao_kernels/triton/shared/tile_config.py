"""Tile configurations and split-K factors, chosen by rules; none is measured."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["LaunchConfig", "TileConfig", "described", "options", "splits_of"]

#: fewest K tiles of a split, and most splits of K
_FEWEST_TILES, _MOST_SPLITS = 2, 8
#: warps that an SM should have: two for each of its schedulers, so that one computes while the other waits
_WARPS = 8


class TileConfig(NamedTuple):
    """The tile of a CTA, its warps, and stages of the pipeline; K of a tile is fixed by the layout."""

    block_m: int
    num_warps: int
    num_stages: int
    block_n: int = 128


class LaunchConfig(NamedTuple):
    """A `TileConfig`, and the number of splits of K (split-K)."""

    tile: TileConfig
    splits: int


def splits_of(output_tiles: int, k_tiles: int, num_warps: int, sm_count: int) -> int:
    """The number of splits of K with which a launch should end first.

    As many CTAs run at a time as give every SM `_WARPS` warps. Each takes the time of its K tiles, one more
    to begin and end, and where K is split of another one for partial sums. No split is empty.
    """

    def time(splits: int) -> int:
        share = -(-k_tiles // splits)
        waves = -(-output_tiles * splits // (sm_count * max(_WARPS // num_warps, 1)))
        return waves * (share + 1 + (splits > 1))

    candidates = [
        splits
        for splits in range(1, _MOST_SPLITS + 1)
        if splits == 1
        or (k_tiles >= _FEWEST_TILES * splits and -(-k_tiles // -(-k_tiles // splits)) == splits)
    ]
    return min(candidates, key=lambda splits: (time(splits), splits))


def options(num_warps: int, stages: int, *, pdl: bool) -> dict[str, Any]:
    """The launch options of Triton; `pdl`, with programmatic dependent launch."""
    own = {"launch_pdl": True} if pdl else {}
    return {"num_warps": num_warps, "num_stages": stages, **own}


def described(config: LaunchConfig) -> str:
    """For `explain`."""
    tile = config.tile
    return (
        f"tiles of {tile.block_m} rows × {tile.block_n}, split-K {config.splits}, "
        f"{tile.num_stages} stages"
    )
