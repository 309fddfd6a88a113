"""Files that may be anybody's: looked at before they are opened, and parsed by a schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ao_core.errors import CheckpointError
from ao_core.regular_files import not_a_file
from ao_core.schema import Schema, SchemaError, check, parse_json

__all__ = ["leads_out", "read_json"]

#: bytes of the largest file of JSON that is read
_LARGEST = 1 << 30


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a file of a folder is a link to somewhere outside.

    In the cache of Hugging Face the files of a folder are links to the blobs of the same repository,
    which are none.
    """
    target, home = path.resolve(), folder.resolve()
    inside = [home]
    if home.parent.name == "snapshots":
        inside.append(home.parent.parent / "blobs")
    return not any(target.is_relative_to(place) for place in inside)


def read_json(path: Path, schema: Schema, name: str) -> Any:
    """The data in a file of JSON; `name` is what errors call it.

    Raises:
        SchemaError: it is not what the schema says; names the field.
        CheckpointError: it cannot be read.
    """
    if reason := not_a_file(path):
        raise CheckpointError(f"{path}: {reason}")
    try:
        size = path.stat().st_size
        data = parse_json(path.read_bytes()) if size <= _LARGEST else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if size > _LARGEST:
        raise SchemaError(f"it has {size} bytes, and {_LARGEST} are the most that is read")
    check(data, schema, name)
    return data
