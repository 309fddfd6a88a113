"""Tensors that are spread over ranks (`DTensor`): this rank's part, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_sharded", "local_shard", "local_shards", "shard_like"]


def is_sharded(x: Any) -> bool:
    """Whether `x` is a `DTensor`, which takes only operations that torch has sharding rules for."""
    return hasattr(x, "placements")


def local_shard(x: Any) -> Any:
    """What this rank holds of a `DTensor`, apart from autograd; anything else itself."""
    return getattr(x, "_local_tensor", x)


def local_shards(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`local_shard` of each. Classes are asked, of which there are few: to ask each tensor takes longer."""
    if any(hasattr(cls, "placements") for cls in {type(tensor) for tensor in tensors}):
        return [local_shard(tensor) for tensor in tensors]
    return tensors


def shard_like(like: Tensor, part: Tensor) -> Tensor:
    """A tensor around this rank's `part`, spread over the ranks as `like` is; `part` where that is not."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    spread: Any = like
    with torch.no_grad():
        return DTensor.from_local(
            part,
            spread.device_mesh,
            spread.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
