"""Making files that are complete the checkpoint of a directory, so that a kill leaves the old or the new.

The pointer to a checkpoint is one file: the index where there is one, else the single file of
tensors. Everything is written and synced under other names first; then that one file is replaced,
created or removed, which the file system does at once.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ao_core.tensor.saving.checkpoint import INDEX, SHARD_NAME, SINGLE
from ao_core.tensor.saving.shards import write_file

__all__ = ["Written", "make_dirs", "publish", "shard_names", "sync_dir", "write_index"]


class Written(NamedTuple):
    """A file of tensors that is complete."""

    #: bytes of each plain tensor
    nbytes: dict[str, int]
    crc32: str


def shard_names(target: Path, written: Sequence[Written]) -> list[str]:
    """Names for the files of tensors; if there are several, no other content in the directory has them."""
    if len(written) == 1:
        return [SINGLE]
    names = [f"model-{i + 1:05}-of-{len(written):05}.safetensors" for i in range(len(written))]
    if not any((target / name).exists() for name in names):
        return names
    token = f"{zlib.crc32(''.join(file.crc32 for file in written).encode()):08x}"
    return [name.replace("model-", f"model-{token}-") for name in names]


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


def publish(target: Path, work: Path, names: Sequence[str]) -> None:
    """Make the files `0`, `1`, … and the index of `work` the checkpoint of `target`.

    The last rename or removal decides. Killed and called again, it goes on.
    """
    for number, name in enumerate(names):
        # a file of an older checkpoint is overwritten only if it is the pointer, or if an index is
        _move(work / str(number), target / name)
    sync_dir(target)
    if len(names) > 1:
        _move(work / INDEX, target / INDEX)
    else:
        (target / INDEX).unlink(missing_ok=True)
    sync_dir(target)
    for file in target.iterdir():
        ours = file.name == SINGLE or SHARD_NAME.fullmatch(file.name)
        if ours and file.name not in names:
            with suppress(OSError):  # the new checkpoint is in place; the next save tries again
                file.unlink()


def _move(source: Path, target: Path) -> None:
    if source.exists() or not target.exists():
        os.replace(source, target)


def make_dirs(target: Path) -> None:
    """Make a directory and its parents, durably."""
    if not target.exists():
        make_dirs(target.parent)
        target.mkdir()
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
