"""FSDP2: gathering the parts of a sharded `QTensor`, generic over layouts.

Parts that dimension 0 divides are gathered; parts shared by all rows (a scale per tensor) are the same
on every rank and stay where they are. Shards must end between the elements that a part stores together.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import SHARED, Parts
from ao_core.tensor.cut import geometry
from ao_core.tensor.qtensor import QTensor

__all__ = ["post_all_gather", "pre_all_gather"]

#: the dotted names of gathered parts, and the full size of the parameter
Metadata = tuple[tuple[str, ...], tuple[int, ...]]


def _sharded_leaves(tensor: QTensor, prefix: str = "") -> list[str]:
    """Dotted names of the plain parts that dimension 0 divides."""
    names: list[str] = []
    for name, axes in geometry(tensor).items():
        if name not in tensor.part_names or axes[0] is SHARED:
            continue
        part = getattr(tensor, name)
        if isinstance(part, QTensor):
            names += _sharded_leaves(part, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def pre_all_gather(
    shard: QTensor, outer_size: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], Metadata]:
    """The plain tensors that all ranks exchange for one parameter."""
    _check_even(shard)
    names = _sharded_leaves(shard)
    leaves = dict(shard.leaves())
    return tuple(leaves[name].contiguous() for name in names), (tuple(names), outer_size)


def post_all_gather(
    shard: QTensor, outputs: tuple[Tensor, ...], metadata: Metadata, out: QTensor | None
) -> Any:
    """The whole parameter around the gathered parts; with `out` it is there already."""
    if out is not None:
        return None
    names, outer_size = metadata
    gathered = dict(zip(names, outputs, strict=False))
    return _with_leaves(shard, gathered, outer_size), outputs


def _with_leaves(
    shard: QTensor, gathered: dict[str, Tensor], shape: tuple[int, ...], prefix: str = ""
) -> QTensor:
    parts: Parts = {}
    for name, part in shard.parts.items():
        if isinstance(part, QTensor):
            rows = shape[0] if part.shape[0] == shard.shape[0] else part.shape[0]
            nested = (rows, *part.shape[1:])
            parts[name] = _with_leaves(part, gathered, nested, f"{prefix}{name}.")
        else:
            parts[name] = gathered.get(prefix + name, part)
    return shard.like(parts, shape)


def _check_even(shard: QTensor) -> None:
    for name, axes in geometry(shard).items():
        axis = axes[0]
        if name in shard.part_names and axis is not SHARED and shard.shape[0] % axis.values:
            raise UnsupportedOp(
                f"FSDP on layout {shard.spec.layout!r}: a shard of {shard.shape[0]} rows cuts through "
                f"{axis.values} rows that share one entry of {name!r}; use a block of 1 along dimension 0"
            )
