"""SHA-256 of each tensor of a checkpoint, read from its files some bytes at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ao_core.errors import CheckpointError
from ao_core.schema import SchemaError
from ao_core.tensor.saving.checkpoint import Checkpoint
from ao_core.tensor.saving.shards import Place, places_of

__all__ = ["first_difference", "tensor_hashes"]

_BUFFER = 1 << 20


def _sha256(path: Path, name: str, place: Place) -> str:
    """The hash of dtype, shape and bytes."""
    sha = hashlib.sha256(f"{place.dtype}{list(place.shape)}".encode())
    with path.open("rb", buffering=0) as file:
        file.seek(place.start)
        left = place.end - place.start
        while left and (data := file.read(min(_BUFFER, left))):
            sha.update(data)
            left -= len(data)
    if left:
        raise CheckpointError(f"{path}: ends within {name!r}")
    return sha.hexdigest()


def tensor_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """The SHA-256 of dtype, shape and bytes of every plain tensor, by name and sorted.

    Each thread holds 1 MB. hashlib works outside of Python's lock, so that all processors take part.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    try:
        found = {
            name: (path, name, place)
            for path in checkpoint.files
            for name, place in places_of(path)[1].items()
        }
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            hashes = pool.map(_sha256, *zip(*found.values(), strict=True)) if found else ()
            by_name = dict(zip(found, hashes, strict=True))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{checkpoint.path}: cannot be read: {reason}") from error
    except SchemaError as error:
        raise CheckpointError(f"{checkpoint.path}: cannot be read: {error}") from error
    return {name: by_name[name] for name in sorted(by_name)}


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
