"""Checkpoints of models that are spread over ranks, in the one format that ao has on disk.

Ranks write their shards with the safetensors writer of torch's distributed checkpoint, and the first rank
joins them into what `save_model` would have written. Loading reads from these files what each rank needs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import QTensor, Spec, open_checkpoint, save_model
from ao_core.ext import CheckpointError, checked
from ao_core.ext.kernels import local_shard
from ao_core.ext.saving import (
    Checkpoint,
    check_no_extra_state,
    natural,
    owners_of,
    rebuild,
    write_checkpoint,
)
from ao_hf.export.flat import FlatState, flatten_state, restored

__all__ = ["load_sharded", "save_sharded"]

#: of the shards, inside the folder, until they are joined
_SHARDS = ".ao-shards"


@checked
def save_sharded(
    model: nn.Module, dir: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write the checkpoint of a model that is spread over ranks; every rank calls this.

    The files are the same, byte for byte, as those of `save_model` of the whole model. Each rank writes what
    it holds, which the first rank then joins, so the disk holds the model twice for a moment, and no rank
    holds more than one file of the result in memory. The folder must be one that all ranks see.

    Args:
        model: with quantized and dense tensors, sharded (FSDP2, tensor parallelism) or not.
        dir: created where it does not exist.
        max_shard_size: as for `save_model`.

    Raises:
        CheckpointError: a tensor cannot be saved, or the disk is full; what was there is unchanged.
        UnsupportedOp: a shard ends inside what a part of a format stores together.
    """
    if not _is_distributed():
        save_model(model, dir, max_shard_size=max_shard_size)
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    flat = flatten_state(_state(model))
    target, shards = Path(dir), Path(dir) / _SHARDS
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(shards, ignore_errors=True)
        shards.mkdir(parents=True)
    torch.distributed.barrier()
    tensors: dict[str, Any] = dict(flat.tensors)
    writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
    problem = None
    try:
        save(tensors, storage_writer=writer)
        if torch.distributed.get_rank() == 0:
            joined = _joined(flat, shards)
            write_checkpoint(joined, target, ties=flat.ties, max_shard_size=max_shard_size)
    except CheckpointException as error:  # on every rank, if on any
        raise CheckpointError(f"{target}: could not save: {error}") from error
    except Exception as error:  # on the first, for which the others wait
        problem = error
    finally:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(shards, ignore_errors=True)
    _on_all_ranks(problem)


@checked
def load_sharded(model: nn.Module, dir: str | os.PathLike[str]) -> None:
    """Read a checkpoint into a model that is spread over any number of ranks; every rank calls this.

    Each rank reads its own rows and columns. The values are copied into the tensors of the model, so that
    optimizers and FSDP2 keep them; a rank needs memory for a second copy of its own shards until all is read.

    Args:
        model: quantized as the checkpoint is, and then sharded, or not sharded at all.
        dir: what `save_sharded`, `save_model` or `quantize_checkpoint` wrote.

    Raises:
        CheckpointError: names, shapes, dtypes or formats of the model and the checkpoint differ. The model is
            as it was before.
        UnsupportedOp: a shard ends inside what a part of a format stores together.
    """
    state = _state(model)
    flat = flatten_state(state)
    checkpoint = open_checkpoint(dir)
    _check(flat, checkpoint)
    fresh = _read(flat, checkpoint.files)
    with torch.no_grad():
        for name, tensor in state.items():
            local = local_shard(tensor)
            if name in flat.ties:
                continue
            if isinstance(local, QTensor):
                local.copy_(restored(local, name, fresh))
            else:
                local.copy_(local_shard(fresh[name]))


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers in the order of files."""
    check_no_extra_state(model)
    owners = sorted(owners_of(model), key=lambda owner: natural(owner.fqn))
    for owner in owners:
        if owner.persistent and owner.tensor.device.type == "meta":
            raise CheckpointError(
                f"{owner.fqn} is on the meta device; load the model before it is sharded (load_model), or "
                "give it memory first"
            )
    return {owner.fqn: owner.tensor for owner in owners if owner.persistent}


def _joined(flat: FlatState, shards: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors, whole, one at a time."""
    from ao_hf.export.reader import pieces_of, whole

    pieces = pieces_of(shards.glob("*.safetensors"))
    for owner in flat.leaves:
        record = flat.records.get(owner)
        if record is None:
            yield owner, whole(pieces[owner])
        else:
            yield owner, rebuild(owner, record, lambda leaf: whole(pieces[leaf]))


def _read(flat: FlatState, files: Iterable[Path]) -> Mapping[str, Tensor]:
    """The tensors of `flat`, in memory of their own, sharded as they are."""
    from ao_hf.export.reader import FilesReader, pieces_of, whole

    if not _is_distributed():
        pieces = pieces_of(files)
        return {name: whole(pieces[name]) for name in flat.tensors}
    from torch.distributed.checkpoint.state_dict_loader import load

    fresh: dict[str, Any] = {name: torch.empty_like(t) for name, t in flat.tensors.items()}
    load(fresh, storage_reader=FilesReader(files))
    return fresh


def _check(flat: FlatState, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless a checkpoint holds exactly the tensors of `flat`."""
    if missing := checkpoint.missing_providers():
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(missing)}")
    names = {*flat.tensors, *flat.records, *flat.ties}
    stored = {*checkpoint.slots, *checkpoint.records, *checkpoint.ties}
    problems = [
        f"{title}: {', '.join(sorted(found)[:20])}"
        for title, found in (
            ("missing in the checkpoint", names - stored),
            ("unknown to the model", stored - names),
        )
        if found
    ]
    for name, record in flat.records.items():
        there = checkpoint.records.get(name)
        if name in stored and there != json.loads(json.dumps(record)):
            entry = checkpoint.entries[checkpoint.ties.get(name, name)]
            problems.append(
                f"{name} is {Spec.from_dict(record['spec'])} of {record['shape']} in the model, and "
                f"{entry.spec or entry.dtype} of {list(entry.shape)} in the checkpoint"
            )
    for name, tensor in flat.tensors.items():
        slot = checkpoint.slots.get(name)
        if slot is not None and (slot.dtype, slot.shape) != (tensor.dtype, tuple(tensor.shape)):
            problems.append(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the model, and {slot.dtype} "
                f"{slot.shape} in the checkpoint"
            )
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model; {'. '.join(problems)}. Quantize the model as the "
            "checkpoint is before it is sharded"
        )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _on_all_ranks(problem: Exception | None) -> None:
    """Wait for the first rank, and raise on each what went wrong there."""
    said = [None if problem is None else str(problem)]
    torch.distributed.broadcast_object_list(said, src=0)
    if problem is not None:
        raise problem
    if said[0] is not None:
        raise CheckpointError(said[0])
