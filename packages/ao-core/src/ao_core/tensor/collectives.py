"""Collectives on a `QTensor`, part by part: what `distribute_tensor` and tensor parallelism start with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tables import rule

__all__ = ["broadcast", "scatter"]


def _leaves(tensor: Tensor) -> list[Tensor]:
    return [leaf for _, leaf in tensor.leaves()] if isinstance(tensor, QTensor) else [tensor]


def scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send each rank its piece; the pieces of one tensor have equal parts."""
    outputs, inputs, *rest = args
    work = None
    for position, leaf in enumerate(_leaves(outputs[0])):
        pieces = [[_leaves(piece)[position].contiguous() for piece in group] for group in inputs]
        if work is not None:
            work.wait()
        _, work = func([leaf], pieces, *rest, **kwargs)
    return outputs, work


def broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send all ranks the parts of one."""
    tensors, *rest = args
    work = None
    for leaf in _leaves(tensors[0]):
        if work is not None:
            work.wait()
        _, work = func([leaf], *rest, **kwargs)
    return tensors, work


if dist.is_available():
    rule(torch.ops.c10d.scatter_.default)(scatter)
    rule(torch.ops.c10d.broadcast_.default)(broadcast)
