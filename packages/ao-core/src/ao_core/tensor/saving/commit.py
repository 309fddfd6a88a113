"""Making files that are complete the checkpoint of a directory, so that a kill leaves the old or the new.

The pointer to a checkpoint is one file: the index where there is one, else the single file of
tensors. Everything is written and synced under other names first; then that one file is replaced,
created or removed, which the file system does at once.

Another program's checkpoint may have no such pointer, or an index of its single file: then an index is
made the pointer first, or stays it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ao_core.errors import CheckpointError
from ao_core.tensor.saving.checkpoint import open_checkpoint, read_index
from ao_core.tensor.saving.names import MODEL, FileNames
from ao_core.tensor.saving.shards import write_file

__all__ = ["Written", "make_dirs", "publish", "shard_names", "sync_dir", "write_index"]


class Written(NamedTuple):
    """A file of tensors that is complete."""

    #: bytes of each plain tensor
    nbytes: dict[str, int]
    crc32: str


def shard_names(target: Path, written: Sequence[Written], called: FileNames = MODEL) -> list[str]:
    """Names for the files of tensors, which get an index unless it is the single one alone.

    If they do, no other content in the directory has them.
    """
    if len(written) == 1 and called.single not in _listed(target / called.index):
        return [called.single]
    names = called.shards(len(written))
    if not any((target / name).exists() for name in names):
        return names
    token = f"{zlib.crc32(''.join(file.crc32 for file in written).encode()):08x}"
    return called.shards(len(written), token)


def _listed(index: Path) -> set[str]:
    """The files that an index lists."""
    try:
        weight_map, _ = read_index(index)
    except CheckpointError:  # there is none, or none that anything could be read by
        return set()
    return set(weight_map.values())


def write_index(path: Path, files: Mapping[str, Written]) -> None:
    """Write and sync the index of files by their names."""
    weight_map = {leaf: name for name, file in files.items() for leaf in file.nbytes}
    index = {
        "metadata": {
            "total_size": sum(sum(file.nbytes.values()) for file in files.values()),
            "ao_crc32": {name: file.crc32 for name, file in files.items()},
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_file(path, [json.dumps(index, indent=2).encode()])


def publish(target: Path, work: Path, names: Sequence[str], called: FileNames = MODEL) -> None:
    """Make the files `0`, `1`, … and the index of `work` the checkpoint of `target`.

    The last rename or removal decides. Killed and called again, it goes on.
    """
    index = target / called.index
    _pin(target, work, names, called)
    for number, name in enumerate(names):
        # a file of an older checkpoint is overwritten only if it is the pointer, or if an index is
        _move(work / str(number), target / name)
    sync_dir(target)
    if list(names) == [called.single]:
        index.unlink(missing_ok=True)
    else:
        _move(work / index.name, index)
    sync_dir(target)
    for file in target.iterdir():
        if called.has_tensors(file.name) and file.name not in names:
            with suppress(OSError):  # the new checkpoint is in place; the next save tries again
                file.unlink()


def _pin(target: Path, work: Path, names: Sequence[str], called: FileNames) -> None:
    """Give files that are a checkpoint without a pointer an index, which new files do not change."""
    pointers = (target / called.index, target / called.single)
    if list(names) == [called.single] or any(map(os.path.lexists, pointers)):
        return
    try:
        slots = open_checkpoint(target).slots
    except CheckpointError:  # there is none
        return
    weight_map = {name: slot.path.name for name, slot in slots.items()}
    if not set(weight_map.values()) & set(names):
        pin = work / "pin"
        pin.unlink(missing_ok=True)
        write_file(pin, [json.dumps({"weight_map": weight_map}).encode()])
        os.replace(pin, target / called.index)
        sync_dir(target)


def _move(source: Path, target: Path) -> None:
    if source.exists() or not target.exists():
        os.replace(source, target)


def make_dirs(target: Path) -> None:
    """Make a directory and its parents, durably."""
    if not target.exists():
        make_dirs(target.parent)
        target.mkdir(exist_ok=True)  # another process may have made it meanwhile
        sync_dir(target.parent)


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable; Windows cannot open one, and needs no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
