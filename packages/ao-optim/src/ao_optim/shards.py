"""Questions to all ranks that hold a part of a parameter (`DTensor`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["everywhere"]


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
