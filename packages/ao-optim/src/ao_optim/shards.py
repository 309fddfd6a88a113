"""Parameters that are shards of larger ones (`DTensor`): this rank's part, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core.tensor.codec import is_sharded

__all__ = ["all_local", "everywhere", "local", "shard_like"]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: memory that is shared with it."""
    whole: Any = tensor
    return whole.to_local() if is_sharded(tensor) else tensor


def all_local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`local` of each. Classes are asked, of which there are few; asking a tensor takes longer."""
    if any(hasattr(cls, "placements") for cls in {type(tensor) for tensor in tensors}):
        return [local(tensor) for tensor in tensors]
    return tensors


def shard_like(like: Tensor, part: Tensor) -> Tensor:
    """A tensor around this rank's part that is spread over the ranks as another of its size is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    spread: Any = like
    return DTensor.from_local(
        part, spread.device_mesh, spread.placements, shape=like.shape, stride=like.stride()
    )


def everywhere(holds: bool, tensors: Iterable[Tensor]) -> bool:
    """Whether something holds on all ranks over which any of the tensors is spread."""
    meshes: dict[Any, None] = dict.fromkeys(
        tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")
    )
    for mesh in meshes:
        flag = torch.tensor(float(holds), device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(
                flag, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim)
            )
        holds = bool(flag)
    return holds
