"""Writing a checkpoint so that whenever it is killed, the old or the new one is there, whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ao_core.arguments import checked
from ao_core.errors import CheckpointError, ConfigError
from ao_core.tensor.saving.checkpoint import open_files
from ao_core.tensor.saving.commit import (
    Written,
    make_dirs,
    publish,
    shard_names,
    sync_dir,
    write_index,
)
from ao_core.tensor.saving.header import header_of
from ao_core.tensor.saving.leaves import Record, check_storable, flatten
from ao_core.tensor.saving.lock import LOCK, Done, done_to, lock_of, text_of
from ao_core.tensor.saving.names import MODEL
from ao_core.tensor.saving.owners import check_no_extra_state, owners_of
from ao_core.tensor.saving.shards import checksum, store, write_file, write_shard
from ao_core.tensor.saving.state_dicts import untie

__all__ = ["bytes_of_text", "natural", "parse_size", "save_model", "write_checkpoint"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNFINISHED = ".saving-"


@checked
def save_model(
    model: nn.Module, dir: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write the parameters and persistent buffers of a model into a directory, without pickle.

    A checkpoint that is there is replaced at once when the new one is complete, so the disk must
    hold both for a moment. Other files in the directory are left alone. Tied tensors are written
    once, kernel layouts as canonical ones, a `ComputeWeight` as its dense memory. Equal tensors under
    equal names give equal files, in whatever order a model has them. Only one process may save into
    a directory at a time. `ao.lock.json` next to them records what was done to the model, and a hash of each
    tensor, see `Lock`.

    Args:
        model: with quantized and dense tensors on any real device.
        dir: created where it does not exist.
        max_shard_size: bytes, or "200MB", "5GB", "1GiB"; a larger parameter has a file of its own.
            What a GPU or a kernel's layout holds is copied to the CPU for one file at a time.

    Raises:
        CheckpointError: a tensor cannot be saved, or the disk is full; what was there is unchanged.
        ConfigError: `max_shard_size` is not a size.
    """
    check_no_extra_state(model)
    owners = sorted(owners_of(model), key=lambda owner: natural(owner.fqn))
    kept, ties = untie({o.fqn: o.tensor for o in owners if o.persistent})
    for fqn, tensor in kept.items():
        check_storable(fqn, tensor)  # before anything is written
    write_checkpoint(
        kept.items(), dir, ties=ties, max_shard_size=max_shard_size, steps=done_to(model)
    )


@checked
def write_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    dir: str | os.PathLike[str],
    *,
    ties: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    steps: Sequence[Done] = (),
) -> None:
    """Write tensors as they come, as `save_model` does; one file's worth of them is held at a time.

    Args:
        tensors: (name, quantized or dense tensor); no name twice.
        dir: created where it does not exist.
        ties: names that stand for the tensor of another name.
        max_shard_size: as for `save_model`.
        steps: what was done to the tensors, for the lock.

    Raises:
        CheckpointError: as for `save_model`. An error of the iterable passes through; what was in
            the directory is unchanged then too.
        ConfigError: `max_shard_size` is not a size.
    """
    limit, target, ties = parse_size(max_shard_size), Path(dir), dict(ties or {})
    try:
        make_dirs(target)
        for left in target.glob(f"{_UNFINISHED}*"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
        work = target / f"{_UNFINISHED}{secrets.token_hex(4)}"
        work.mkdir()
        try:
            written = _write(work, tensors, ties, limit)
            names = shard_names(target, written)
            if names != [MODEL.single]:
                write_index(work / MODEL.index, dict(zip(names, written, strict=True)))
            lock = lock_of(open_files([work / str(i) for i in range(len(names))]), steps)
            write_file(work / LOCK, [text_of(lock).encode()])
            publish(target, work, names)
            # last: killed before, there is the lock of the old checkpoint, whose hashes are not those
            os.replace(work / LOCK, target / LOCK)
            sync_dir(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{target}: could not save: {error.strerror or error}. "
            "A checkpoint that was there is not damaged"
        ) from error


def _write(
    work: Path, tensors: Iterable[tuple[str, Tensor]], ties: dict[str, str], limit: int
) -> list[Written]:
    """Write shards `0`, `1`, … in the order of the tensors; all parts of a tensor are in one."""
    written: list[Written] = []
    shard: dict[str, Tensor] = {}
    records: dict[str, Record] = {}
    room, seen = limit, set[str]()
    for fqn, tensor in tensors:
        leaves, record = flatten(fqn, tensor)
        if twice := seen & leaves.keys():
            raise CheckpointError(f"two tensors would be stored as {min(twice)!r}; rename one")
        seen |= leaves.keys()
        nbytes = sum(leaf.nbytes for leaf in leaves.values())
        if shard and nbytes > room:
            written.append(_write_one(work / str(len(written)), shard, records, ties))
            shard, records, room = {}, {}, limit
        shard |= leaves
        if record is not None:
            records[fqn] = record
        room -= nbytes
    written.append(_write_one(work / str(len(written)), shard, records, ties))
    return written


def _write_one(
    path: Path, shard: dict[str, Tensor], records: dict[str, Record], ties: dict[str, str]
) -> Written:
    stored, raw = store({name: leaf.cpu() for name, leaf in shard.items()})
    tied = {name: owner for name, owner in ties.items() if owner in shard or owner in records}
    crcs = {name: checksum(leaf) for name, leaf in stored.items()}
    metadata = header_of(records, tied, raw, crcs)
    write_shard(path, stored, metadata)
    return Written({name: leaf.nbytes for name, leaf in stored.items()}, metadata["ao_crc32"])


def natural(name: str) -> list[int | str]:
    """A key that sorts layer 10 after layer 9: text and numbers by turns."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def bytes_of_text(text: str) -> int:
    """Bytes of "1.2GB", "300 MB", "1GiB" or a plain number; 0 where that is not a positive size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    return 0 if match is None or unit is None else int(float(match[1]) * unit)


def parse_size(size: int | str) -> int:
    """Bytes of a `max_shard_size`.

    Raises:
        ConfigError: it is not a positive size.
    """
    value = bytes_of_text(str(size))
    if value < 1:
        raise ConfigError(
            f"max_shard_size={size!r}: give positive bytes, or a size such as "
            '"200MB", "5GB" or "1GiB"'
        )
    return value
