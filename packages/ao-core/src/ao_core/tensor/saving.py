"""Saving a model: safetensors files that replace an older checkpoint at once.

The pointer to a checkpoint is one file: the index where there is one, else the single file of tensors.
A save writes and syncs everything under other names first, and then replaces, creates or removes that
one file. Whenever it is killed, the old or the new checkpoint is there, whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor, nn

from ao_core.errors import CheckpointError, ConfigError
from ao_core.tensor.checkpoint import INDEX, SINGLE
from ao_core.tensor.owners import check_no_extra_state, owners_of
from ao_core.tensor.shards import write_shard
from ao_core.tensor.stored import Form, Record, flatten, header_of, untie

__all__ = ["save_model"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SHARD_NAME = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
_UNFINISHED = ".saving-"


@dataclass(frozen=True)
class _Planned:
    """A parameter or buffer that is to be written."""

    fqn: str
    tensor: Tensor
    record: Record | None
    #: of its plain tensors, by name
    forms: dict[str, Form]

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.forms.values())


def save_model(
    model: nn.Module, dir: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write the parameters and persistent buffers of a model into a directory, without pickle.

    A checkpoint that is there is replaced at once when the new one is complete, so both need room on
    the disk for a moment; other files in the directory are left alone. Tied tensors are written once.
    Kernel layouts become canonical ones. Only one process may save into a directory at a time.

    Args:
        model: may hold quantized, dense and `ComputeWeight` parameters (these as their dense memory).
        dir: created where it does not exist.
        max_shard_size: bytes, or "200MB", "5GB", "1GiB"; a single larger parameter has its own file.

    Raises:
        CheckpointError: a tensor cannot be saved, or the disk is full; the old checkpoint is still there.
        ConfigError: `max_shard_size` is no size.
    """
    limit = _parse_size(max_shard_size)
    kept, ties = untie({o.fqn: o.tensor for o in owners_of(model) if o.persistent})
    check_no_extra_state(model)
    shards = _split([_planned(fqn, tensor) for fqn, tensor in kept.items()], limit)
    target = Path(dir)
    total = sum(planned.nbytes for shard in shards for planned in shard)
    try:
        _make_dirs(target)
        for left in target.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left)
        work = target / f"{_UNFINISHED}{secrets.token_hex(4)}"
        work.mkdir()
        try:
            _commit(target, work, _write(work, shards, ties, _names(target, len(shards))))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{target}: could not save {total:,} bytes: {error.strerror or error}. "
            "The checkpoint that was there, if any, is unchanged"
        ) from error


def _planned(fqn: str, tensor: Tensor) -> _Planned:
    leaves, record = flatten(fqn, tensor)
    forms = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves.items()}
    return _Planned(fqn, tensor, record, forms)


def _split(planned: list[_Planned], limit: int) -> list[list[_Planned]]:
    """Fill shards in the order of the model; all parts of a tensor stay in one."""
    shards: list[list[_Planned]] = [[]]
    room, seen = limit, set[str]()
    for item in planned:
        if twice := seen & item.forms.keys():
            raise CheckpointError(f"two tensors would be stored as {min(twice)!r}; rename one of them")
        seen |= item.forms.keys()
        if shards[-1] and item.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= item.nbytes
    return shards


def _names(target: Path, count: int) -> list[str]:
    """Names for the files of tensors, which nothing in the directory has if there are several."""
    if count == 1:
        return [SINGLE]
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if not any((target / name).exists() for name in names):
        return names
    return [name.replace("model-", f"model-{secrets.token_hex(4)}-") for name in names]


def _write(
    work: Path, shards: list[list[_Planned]], ties: dict[str, str], names: list[str]
) -> list[str]:
    """Write and sync all files of a checkpoint; returns the names of those with tensors."""
    weight_map: dict[str, str] = {}
    checksums: dict[str, str] = {}
    for name, shard in zip(names, shards):
        checksums[name] = _write_one(work / name, shard, ties)
        weight_map |= {leaf: name for item in shard for leaf in item.forms}
    if len(names) > 1:
        total = sum(item.nbytes for shard in shards for item in shard)
        index = {
            "metadata": {"total_size": total, "ao_crc32": checksums},
            "weight_map": dict(sorted(weight_map.items())),
        }
        with (work / INDEX).open("x", encoding="utf-8") as file:
            json.dump(index, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
    return names


def _write_one(path: Path, shard: list[_Planned], ties: dict[str, str]) -> str:
    forms = {name: form for item in shard for name, form in item.forms.items()}
    owners = {name: item for item in shard for name in item.forms}
    fqns = {item.fqn for item in shard}
    records = {item.fqn: item.record for item in shard if item.record is not None}
    tied = {name: owner for name, owner in ties.items() if owner in fqns}

    def fetch(name: str) -> Tensor:
        # a kernel's layout is converted again for each part, so that at most one tensor is held twice
        return flatten(owners[name].fqn, owners[name].tensor)[0][name]

    return write_shard(path, forms, fetch, lambda crcs: header_of(records, tied, forms, crcs))


def _commit(target: Path, work: Path, names: list[str]) -> None:
    """Make the files in `work` the checkpoint of `target`; see the module for why this is atomic."""
    if names == [SINGLE]:
        # while there is an index, the single file is not looked at
        os.replace(work / SINGLE, target / SINGLE)
        _sync_dir(target)
        (target / INDEX).unlink(missing_ok=True)
    else:
        for name in names:
            os.replace(work / name, target / name)
        _sync_dir(target)
        os.replace(work / INDEX, target / INDEX)
    _sync_dir(target)
    for file in target.iterdir():
        ours = file.name == SINGLE or _SHARD_NAME.fullmatch(file.name)
        if ours and file.name not in names:
            file.unlink()


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
    if match is None or match[2].upper() not in _UNITS or (value := float(match[1])) <= 0:
        raise ConfigError(
            f'max_shard_size={size!r}: give positive bytes, or a size such as "200MB", "5GB" or "1GiB"'
        )
    return max(int(value * _UNITS[match[2].upper()]), 1)
