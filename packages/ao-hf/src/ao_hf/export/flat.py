"""A sharded state dict as plain tensors: what writers of torch's distributed checkpoint take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext import SHARED, CheckpointError, Geometry, UnsupportedOp
from ao_core.ext.kernels import geometry, is_sharded, local_shard, part_size
from ao_core.ext.saving import Record, record_of, untie

__all__ = ["FlatState", "flatten_state", "restored"]


@dataclass(frozen=True)
class FlatState:
    """Plain tensors and `DTensor`s by the names of ao's files, and what they are together."""

    #: parts of quantized tensors ("layer.weight.qdata") and dense tensors; they share memory with the model
    #: unless its layout is that of a kernel
    tensors: dict[str, Tensor]
    #: by the name of a parameter or buffer: the names of the tensors it is made of
    leaves: dict[str, tuple[str, ...]]
    #: what is quantized, of the whole tensors and not of shards
    records: dict[str, Record]
    #: names that stand for another name's tensor
    ties: dict[str, str]


def flatten_state(state_dict: Mapping[str, Tensor]) -> FlatState:
    """Take quantized tensors apart, each part sharded as the tensor is.

    Parts are in the canonical layout, under the names that `save_model` gives them. A part that all
    rows (or columns) share is replicated where the tensor is sharded along them.

    Args:
        state_dict: of a model with or without shards, e.g. from `get_model_state_dict`.

    Raises:
        CheckpointError: a value is no tensor, or two tensors would have the same name.
        UnsupportedOp: a shard ends inside what a part stores together.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; a checkpoint holds tensors only"
            )
    local = {name: local_shard(tensor) for name, tensor in state_dict.items()}
    kept, ties = untie(local)
    tensors: dict[str, Tensor] = {}
    leaves: dict[str, tuple[str, ...]] = {}
    records: dict[str, Record] = {}
    for name, shard in kept.items():
        whole: Any = state_dict[name]
        if isinstance(shard, QTensor):
            parts = _parts(name, whole, _canonical(shard))
            records[name] = record_of(_whole(_canonical(shard), tuple(whole.shape)))
        else:
            parts = {name: whole.detach()}
        if twice := tensors.keys() & parts.keys():
            raise CheckpointError(f"two tensors would be stored as {min(twice)!r}; rename one")
        tensors |= parts
        leaves[name] = tuple(parts)
    return FlatState(tensors, leaves, records, ties)


def restored(shard: QTensor, name: str, parts: Mapping[str, Tensor]) -> QTensor:
    """A rank's `shard` of the tensor `name` in its canonical layout, around other `parts`."""
    canonical = _canonical(shard)
    return _around(canonical, f"{name}.", parts)


def _around(tensor: QTensor, prefix: str, parts: Mapping[str, Tensor]) -> QTensor:
    return tensor.like(
        {
            n: _around(p, f"{prefix}{n}.", parts)
            if isinstance(p, QTensor)
            else local_shard(parts[prefix + n])
            for n, p in tensor.parts.items()
        }
    )


def _canonical(tensor: QTensor) -> QTensor:
    outer = tensor.canonical()
    parts = outer.parts.items()
    return outer.like({n: _canonical(p) if isinstance(p, QTensor) else p for n, p in parts})


def _whole(shard: QTensor, shape: tuple[int, ...]) -> QTensor:
    """A stand-in for the whole tensor, for its record: its plain parts are those of the shard."""
    if shard.flat_from is not None or tuple(shard.shape) == shape:
        return shard
    stored = _stored(shard, shape)
    parts = {
        name: _whole(part, part_size(shard, name, stored)) if isinstance(part, QTensor) else part
        for name, part in shard.parts.items()
    }
    return shard.like(parts, shape)


def _stored(tensor: QTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes in the order in which dimensions are stored."""
    return tuple(shape[tensor.order.index(dim)] for dim in range(len(shape)))


def _parts(name: str, whole: Any, shard: QTensor) -> dict[str, Tensor]:
    """The plain parts of one tensor, sharded as `whole` is."""
    if not is_sharded(whole):
        return {f"{name}.{part}": leaf.detach() for part, leaf in shard.leaves()}
    if shard.flat_from is not None:
        raise UnsupportedOp(f"{name} is viewed flat and sharded; view it in its own shape first")
    placements = tuple(_moved(placement, shard.order) for placement in whole.placements)
    stored = _stored(shard, tuple(whole.shape))
    return _spread(name, shard, stored, whole.device_mesh, placements)


def _spread(
    prefix: str, shard: QTensor, stored: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]
) -> dict[str, Tensor]:
    """The plain parts of a shard of a tensor of `stored` shape; `placements` are of stored dimensions."""
    found: dict[str, Tensor] = {}
    for part_name, axes in geometry(shard).items():
        name, part = f"{prefix}.{part_name}", getattr(shard, part_name)
        size = part_size(shard, part_name, stored)
        placed = tuple(_of_part(name, placement, axes) for placement in placements)
        if isinstance(part, QTensor):
            found |= _spread(name, part, size, mesh, placed)
        else:
            found[name] = _distributed(name, part.detach(), size, mesh, placed)
    return found


def _moved(placement: Any, order: tuple[int, ...]) -> Any:
    """A placement of the stored dimension in place of the logical one."""
    if placement.is_replicate():
        return placement
    if not placement.is_shard():
        raise UnsupportedOp(f"placement {placement}: quantized tensors are sharded or replicated")
    return type(placement)(order[placement.dim])


def _of_part(name: str, placement: Any, axes: Geometry) -> Any:
    """How a part is placed where the tensor is placed so."""
    from torch.distributed.tensor import Replicate

    if placement.is_replicate():
        return placement
    if placement.dim >= len(axes):
        raise UnsupportedOp(f"{name} cannot be cut along dimension {placement.dim}")
    return Replicate() if axes[placement.dim] is SHARED else placement


def _distributed(
    name: str, part: Tensor, size: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]
) -> Tensor:
    """A plain part of this rank as a shard of a tensor of `size`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    here, _ = compute_local_shape_and_global_offset(size, mesh, placements)
    if tuple(here) != tuple(part.shape):
        raise UnsupportedOp(
            f"{name}: this rank holds {tuple(part.shape)} of {size}, and the distributed checkpoint of torch "
            f"expects {tuple(here)}: a shard ends inside what the part stores together; use a number of "
            "ranks that divides it"
        )
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(size), stride=stride
    )
