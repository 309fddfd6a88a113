"""`verify_checkpoint`: whether the files of a checkpoint are, bit for bit, what was written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from ao_core.arguments import checked
from ao_core.checkpoints.files import MANIFEST, WORK
from ao_core.checkpoints.join import hash_of
from ao_core.checkpoints.state import STATE
from ao_core.errors import CheckpointError
from ao_core.regular_files import not_a_file
from ao_core.schema import COUNT, FILE_NAME, SHA256, Fields, SchemaError, Table
from ao_core.tensor.saving import open_checkpoint
from ao_core.tensor.saving.files import leads_out, read_json

__all__ = ["Verified", "verify_checkpoint"]

#: what a manifest must be, to compare with it
_FIELDS = Fields({"files": Table(Fields({"bytes": COUNT, "sha256": SHA256}), FILE_NAME)})


class Verified(NamedTuple):
    """What was found for one file."""

    name: str
    nbytes: int
    #: what was recomputed: "sha256" of the file, or "crc32" of its tensors
    by: str
    #: empty if it is what was written, else what is wrong
    problem: str


@checked
def verify_checkpoint(path: str | os.PathLike[str]) -> list[Verified]:
    """Recompute the hashes of a checkpoint, for each of its files.

    With a manifest, as `quantize_checkpoint` writes it, the SHA-256 of each file that it lists; of what
    `save_model` wrote, the checksum of each tensor. Nothing outside the directory is read, and no device
    or pipe.

    Raises:
        CheckpointError: there is no checkpoint, nothing to compare with, or its run is unfinished.
    """
    path = Path(path)
    if os.path.lexists(path / WORK / STATE):
        raise CheckpointError(
            f"{path}: an unfinished run of quantize_checkpoint is there; run the same command again to "
            "finish it"
        )
    if os.path.lexists(path / MANIFEST):
        return _by_manifest(path)
    return _by_checksums(path)


def _by_manifest(path: Path) -> list[Verified]:
    try:
        listed = read_json(path / MANIFEST, _FIELDS, "manifest")["files"]
    except SchemaError as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    found = [_compared(path, name, **listed[name]) for name in sorted(listed)]
    strangers = sorted({file.name for file in path.glob("*.safetensors")} - listed.keys())
    for name in strangers:
        problem = f"it is not listed in {MANIFEST}"
        found.append(Verified(name, _size(path / name), "sha256", problem))
    return found


def _compared(folder: Path, name: str, bytes: int, sha256: str, **more: Any) -> Verified:
    """What became of a file that had so many bytes, and this hash."""
    file, problem = folder / name, ""
    try:
        if reason := not_a_file(file):
            problem = f"it {reason}"
        elif leads_out(file, folder):
            problem = "it is a link to a file outside the folder"
        elif (size := file.stat().st_size) != bytes:
            problem = f"it has {size} bytes, and had {bytes}"
        elif (now := hash_of(file)) != sha256:
            problem = f"its SHA-256 is {now}, and was {sha256}"
    except OSError as error:
        problem = f"it cannot be read: {error.strerror or error}"
    return Verified(name, _size(file), "sha256", problem)


def _size(file: Path) -> int:
    return 0 if not_a_file(file) else file.stat().st_size


def _by_checksums(path: Path) -> list[Verified]:
    checkpoint = open_checkpoint(path)
    problems: dict[Path, list[str]] = {file: [] for file in checkpoint.files}
    for slot in checkpoint.slots.values():
        if slot.crc32 is None:
            raise CheckpointError(
                f"{slot.path}: {slot.name!r} has no checksum, and there is no {MANIFEST}: there is "
                "nothing to compare with"
            )
        try:
            slot.read()
        except CheckpointError as error:
            problems[slot.path].append(str(error).removeprefix(f"{slot.path}: "))
    return [
        Verified(file.name, file.stat().st_size, "crc32", "; ".join(found))
        for file, found in problems.items()
    ]
