"""Parameters that are shards of larger ones (`DTensor`): this rank's part, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["is_sharded", "local", "shard_like"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: memory that is shared with it."""
    whole: Any = tensor
    return whole.to_local() if is_sharded(tensor) else tensor


def shard_like(like: Tensor, part: Tensor) -> Tensor:
    """A tensor around this rank's part that is spread over the ranks as another of its size is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    spread: Any = like
    return DTensor.from_local(
        part, spread.device_mesh, spread.placements, shape=like.shape, stride=like.stride()
    )
