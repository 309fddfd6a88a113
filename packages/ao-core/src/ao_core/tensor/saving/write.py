"""Writing a checkpoint so that whenever it is killed, the old or the new one is there, whole.

The pointer to a checkpoint is one file: the index where there is one, else the single file of
tensors. Everything is written and synced under other names first; then that one file is replaced,
created or removed, which the file system does at once.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from ao_core.errors import CheckpointError, ConfigError
from ao_core.tensor.saving.checkpoint import INDEX, SHARD_NAME, SINGLE
from ao_core.tensor.saving.header import header_of
from ao_core.tensor.saving.leaves import Record, check_storable, flatten
from ao_core.tensor.saving.owners import check_no_extra_state, owners_of
from ao_core.tensor.saving.shards import checksum, store, write_shard
from ao_core.tensor.saving.state_dicts import untie

__all__ = ["save_model", "write_checkpoint"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNFINISHED = ".saving-"


class _Written(NamedTuple):
    """A file of tensors that is complete."""

    #: bytes of each plain tensor
    nbytes: dict[str, int]
    crc32: str


def save_model(
    model: nn.Module, dir: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write the parameters and persistent buffers of a model into a directory, without pickle.

    A checkpoint that is there is replaced at once when the new one is complete, so the disk must
    hold both for a moment. Other files in the directory are left alone. Tied tensors are written
    once, kernel layouts as canonical ones, a `ComputeWeight` as its dense memory. Only one process
    may save into a directory at a time.

    Args:
        model: with quantized and dense tensors on any real device.
        dir: created where it does not exist.
        max_shard_size: bytes, or "200MB", "5GB", "1GiB"; a larger parameter has a file of its own.
            What a GPU or a kernel's layout holds is copied to the CPU for one file at a time.

    Raises:
        CheckpointError: a tensor cannot be saved, or the disk is full; what was there is unchanged.
        ConfigError: `max_shard_size` is no size.
    """
    check_no_extra_state(model)
    kept, ties = untie({o.fqn: o.tensor for o in owners_of(model) if o.persistent})
    for fqn, tensor in kept.items():
        check_storable(fqn, tensor)  # before anything is written
    write_checkpoint(kept.items(), dir, ties=ties, max_shard_size=max_shard_size)


def write_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    dir: str | os.PathLike[str],
    *,
    ties: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write tensors as they come, as `save_model` does; one file's worth of them is held at a time.

    Args:
        tensors: (name, quantized or dense tensor); no name twice.
        dir: created where it does not exist.
        ties: names that stand for the tensor of another name.
        max_shard_size: as for `save_model`.

    Raises:
        CheckpointError: as for `save_model`. An error of the iterable passes through; what was in
            the directory is unchanged then too.
        ConfigError: `max_shard_size` is no size.
    """
    limit, target, ties = _parse_size(max_shard_size), Path(dir), dict(ties or {})
    try:
        _make_dirs(target)
        for left in target.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left)
        work = target / f"{_UNFINISHED}{secrets.token_hex(4)}"
        work.mkdir()
        try:
            _commit(target, work, _write(work, tensors, ties, limit))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{target}: could not save: {error.strerror or error}. "
            "A checkpoint that was there is not damaged"
        ) from error


def _write(
    work: Path, tensors: Iterable[tuple[str, Tensor]], ties: dict[str, str], limit: int
) -> list[_Written]:
    """Write shards `0`, `1`, … in the order of the tensors; all parts of a tensor are in one."""
    written: list[_Written] = []
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
) -> _Written:
    stored, raw = store({name: leaf.cpu() for name, leaf in shard.items()})
    tied = {name: owner for name, owner in ties.items() if owner in shard or owner in records}
    crcs = {name: checksum(leaf) for name, leaf in stored.items()}
    metadata = header_of(records, tied, raw, crcs)
    write_shard(path, stored, metadata)
    return _Written({name: leaf.nbytes for name, leaf in stored.items()}, metadata["ao_crc32"])


def _commit(target: Path, work: Path, written: list[_Written]) -> None:
    """Make the files in `work` the checkpoint of `target`; the last rename or removal decides."""
    names = _names(target, len(written))
    if len(names) > 1:
        _write_index(work / INDEX, names, written)
    for number, name in enumerate(names):
        # a file of an older checkpoint is overwritten only if it is the pointer, or if an index is
        os.replace(work / str(number), target / name)
    _sync_dir(target)
    if len(names) > 1:
        os.replace(work / INDEX, target / INDEX)
    else:
        (target / INDEX).unlink(missing_ok=True)
    _sync_dir(target)
    for file in target.iterdir():
        ours = file.name == SINGLE or SHARD_NAME.fullmatch(file.name)
        if ours and file.name not in names:
            with suppress(OSError):  # the new checkpoint is in place; the next save tries again
                file.unlink()


def _names(target: Path, count: int) -> list[str]:
    """Names for the files of tensors; if there are several, nothing in the directory has them."""
    if count == 1:
        return [SINGLE]
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if not any((target / name).exists() for name in names):
        return names
    token = secrets.token_hex(4)
    return [name.replace("model-", f"model-{token}-") for name in names]


def _write_index(path: Path, names: list[str], written: list[_Written]) -> None:
    files = dict(zip(names, written, strict=True))
    weight_map = {leaf: name for name, file in files.items() for leaf in file.nbytes}
    index = {
        "metadata": {
            "total_size": sum(sum(file.nbytes.values()) for file in written),
            "ao_crc32": {name: file.crc32 for name, file in files.items()},
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    with path.open("x", encoding="utf-8") as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _make_dirs(target: Path) -> None:
    if not target.exists():
        _make_dirs(target.parent)
        target.mkdir()
        _sync_dir(target.parent)


def _sync_dir(path: Path) -> None:
    """Make the names in a directory durable; Windows cannot open one, and needs no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse_size(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    value = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if value < 1:
        raise ConfigError(
            f"max_shard_size={size!r}: give positive bytes, or a size such as "
            '"200MB", "5GB" or "1GiB"'
        )
    return value
