"""SHA-256 of each tensor of a checkpoint, read from its files some bytes at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ao_core.errors import CheckpointError
from ao_core.schema import SchemaError, parse_json
from ao_core.tensor.saving.checkpoint import Checkpoint

__all__ = ["first_difference", "tensor_hashes"]

_BUFFER = 1 << 20


class _Place(NamedTuple):
    """Where the bytes of a tensor are."""

    path: Path
    name: str
    #: as the file says it
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def sha256(self) -> str:
        """The hash of dtype, shape and bytes."""
        sha = hashlib.sha256(f"{self.dtype}{list(self.shape)}".encode())
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            left = self.end - self.start
            while left and (data := file.read(min(_BUFFER, left))):
                sha.update(data)
                left -= len(data)
        if left:
            raise CheckpointError(f"{self.path}: ends within {self.name!r}")
        return sha.hexdigest()


def tensor_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """The SHA-256 of dtype, shape and bytes of every plain tensor, by name and sorted.

    Each thread holds 1 MB. hashlib works outside of Python's lock, so that all processors take part.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    places = [place for path in checkpoint.files for place in _places(path)]
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            hashes = list(pool.map(_Place.sha256, places))
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.path}: cannot be read: {error.strerror or error}"
        ) from error
    found = {place.name: told for place, told in zip(places, hashes, strict=True)}
    return {name: found[name] for name in sorted(found)}


def _places(path: Path) -> list[_Place]:
    """Of all tensors of a safetensors file that was opened before, and so is one."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            table: dict[str, Any] = parse_json(file.read(size))
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    table.pop("__metadata__", None)
    return [
        _Place(
            path,
            name,
            told["dtype"],
            tuple(told["shape"]),
            *(8 + size + offset for offset in told["data_offsets"]),
        )
        for name, told in table.items()
    ]


def first_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What of these hashes of tensors differs first, in words; empty: nothing."""
    for name in sorted({*before, *now}):
        if name not in now:
            return f"the tensor {name!r} is missing"
        if name not in before:
            return f"the tensor {name!r} was not there"
        if before[name] != now[name]:
            return f"the tensor {name!r} has other bytes"
    return ""
