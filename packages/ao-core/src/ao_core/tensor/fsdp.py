"""FSDP2: gathering the parts of a sharded `QTensor`, generic over layouts.

Parts that dimension 0 divides are gathered; parts shared by all rows (a scale per tensor) are the same
on every rank and stay where they are. Where the ranks have different numbers of rows, FSDP2 wants
gathered tensors of the padded logical size: the bytes of all parts then travel in one such tensor.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import SHARED, Parts
from ao_core.tensor import cut
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.sharding import is_sharded, local_shard

__all__ = ["gathered", "post_all_gather", "pre_all_gather"]


class Gather(NamedTuple):
    """What one rank must know to put the gathered tensors together."""

    #: dotted names of the gathered parts
    names: tuple[str, ...]
    #: size of the whole parameter, and rows of each rank with padding
    size: tuple[int, ...]
    rows: int
    #: dtype and row shape of each part, where all travel in one tensor of bytes; else empty
    rows_of_parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()


def pre_all_gather(
    shard: QTensor, size: tuple[int, ...], ranks: int
) -> tuple[tuple[Tensor, ...], Gather]:
    """The plain tensors that all ranks exchange for one parameter of `size`."""
    rows = -(-size[0] // ranks)
    if ranks == 1:
        # a world of one: torch 2.13 passes on the first tensor only, and the shard is all there is
        first = next(leaf for _, leaf in shard.leaves())
        return (first.new_empty(0),), Gather((), size, rows)
    names = tuple(_sharded_leaves(shard))
    leaves = dict(shard.leaves())
    parts = [leaves[name].contiguous() for name in names]
    if size[0] % ranks == 0:
        return tuple(_as_bytes(part) for part in parts), Gather(names, size, rows)
    for part, name in zip(parts, names, strict=True):
        if part.shape[0] != shard.shape[0]:
            raise UnsupportedOp(
                f"FSDP on layout {shard.spec.layout!r}: {size[0]} rows do not divide evenly by {ranks} "
                f"ranks, and {name!r} stores several rows together; pad the layer or shard it otherwise"
            )
    kinds = tuple((part.dtype, tuple(part.shape[1:])) for part in parts)
    return (_to_bytes(parts, (rows, *size[1:])),), Gather(names, size, rows, kinds)


def post_all_gather(
    shard: QTensor, outputs: tuple[Tensor, ...], gather: Gather, dtype: torch.dtype, out: Any
) -> Any:
    """The whole parameter around the gathered parts; with `out`, its memory is filled again.

    Its logical dtype is `dtype`, which the policy of FSDP2 for mixed precision chooses.
    """
    leaves = dict(shard.leaves())
    if gather.rows_of_parts:
        pieces = _from_bytes(outputs[0], gather)
    else:  # nothing but an empty tensor comes from a world of one
        named = zip(outputs, gather.names, strict=False)
        pieces = [output.view(leaves[name].dtype) for output, name in named]
    parts = dict(zip(gather.names, pieces, strict=True))
    if out is not None:
        _refill(local_shard(out), {**leaves, **parts})
        return None
    return _with_leaves(shard, parts, gather.size, dtype=dtype), tuple(pieces) or outputs


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 shards, on every rank; any other tensor itself.

    All ranks must call it. A quantized one keeps its codes, while `DTensor.full_tensor` gives dense values.

    Raises:
        UnsupportedOp: a quantized tensor is spread over several dimensions of the mesh, or not by rows.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    shard = local_shard(sharded)
    if not isinstance(shard, QTensor):
        return sharded.full_tensor()  # type: ignore[no-any-return]
    mesh, placements = sharded.device_mesh, tuple(sharded.placements)
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise UnsupportedOp(
            f"gathering a tensor with the placements {placements}: quantized ones are gathered where one "
            "dimension of the mesh shards rows"
        )
    size, ranks, group = tuple(sharded.shape), mesh.size(), mesh.get_group()
    inputs, gather = pre_all_gather(shard, size, ranks)
    outputs = []
    for part in inputs:
        whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=group)
        outputs.append(whole)
    full, _ = post_all_gather(shard, tuple(outputs), gather, shard.dtype, None)
    return full  # type: ignore[no-any-return]


def _refill(target: QTensor, fresh: dict[str, Tensor]) -> None:
    """Write what is not in the memory of a gathered tensor already."""
    for name, leaf in target.leaves():
        if leaf.data_ptr() != fresh[name].data_ptr():
            leaf.copy_(fresh[name])


def _sharded_leaves(tensor: QTensor, prefix: str = "") -> list[str]:
    """Dotted names of the plain parts that dimension 0 divides."""
    names: list[str] = []
    for name, axes in cut.geometry(tensor).items():
        if name not in tensor.part_names or axes[0] is SHARED:
            continue
        part = getattr(tensor, name)
        if isinstance(part, QTensor):
            names += _sharded_leaves(part, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def _with_leaves(
    shard: QTensor,
    gathered: dict[str, Tensor],
    shape: tuple[int, ...],
    prefix: str = "",
    **changes: Any,
) -> QTensor:
    parts: Parts = {}
    for name, part in shard.parts.items():
        if isinstance(part, QTensor):
            # a scale has a row for each row of the tensor, for each block of rows, or for all of them
            size = (*cut.part_size(shard, name, shape)[:1], *part.shape[1:])
            parts[name] = _with_leaves(part, gathered, size, f"{prefix}{name}.")
        else:
            parts[name] = gathered.get(prefix + name, part)
    return shard.like(parts, shape, **changes)


def _as_bytes(part: Tensor) -> Tensor:
    """Codes as uint8: backends of collectives know fewer types than there are formats."""
    return part.view(torch.uint8) if part.element_size() == 1 else part


def _to_bytes(parts: list[Tensor], size: tuple[int, ...]) -> Tensor:
    """One tensor of `size` with the bytes of all parts, row by row, and zeros behind them."""
    rows = parts[0].shape[0]
    # no -1 in these shapes: a rank beyond the last row has none
    flat = [part.reshape(rows, prod(part.shape[1:])).view(torch.uint8) for part in parts]
    row_bytes = sum(part.shape[1] for part in flat)
    elements = prod(size[1:])
    dtype = next(
        (
            d
            for d in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128)
            if elements * d.itemsize >= row_bytes
        ),
        None,
    )
    if dtype is None:
        raise UnsupportedOp(
            f"FSDP with uneven shards: rows of {elements} elements are too short to gather"
        )
    buffer = torch.zeros(
        size[0], elements * dtype.itemsize, dtype=torch.uint8, device=parts[0].device
    )
    buffer[:rows, :row_bytes] = torch.cat(flat, 1)
    return buffer.view(dtype).reshape(size)


def _from_bytes(buffer: Tensor, gather: Gather) -> list[Tensor]:
    """The parts of the whole parameter from the gathered bytes of all ranks; padded rows are at the end."""
    data = buffer.reshape(buffer.shape[0], -1).view(torch.uint8)[: gather.size[0]]
    pieces, start = [], 0
    for dtype, shape in gather.rows_of_parts:
        width = prod(shape) * dtype.itemsize
        piece = data[:, start : start + width].contiguous()
        pieces.append(piece.view(dtype).reshape(gather.size[0], *shape))
        start += width
    return pieces
