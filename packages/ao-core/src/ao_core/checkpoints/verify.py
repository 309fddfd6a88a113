"""`verify_checkpoint`: whether the files of a checkpoint are, bit for bit, what was written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ao_core.checkpoints.files import MANIFEST, WORK
from ao_core.checkpoints.join import hash_of
from ao_core.checkpoints.state import STATE
from ao_core.errors import CheckpointError
from ao_core.tensor.saving import open_checkpoint

__all__ = ["Verified", "verify_checkpoint"]


class Verified(NamedTuple):
    """What was found for one file."""

    name: str
    nbytes: int
    #: what was recomputed: "sha256" of the file, or "crc32" of its tensors
    by: str
    #: empty if it is what was written, else what is wrong
    problem: str


def verify_checkpoint(path: str | os.PathLike[str]) -> list[Verified]:
    """Recompute the hashes of a checkpoint, for each of its files.

    With a manifest, as `quantize_checkpoint` writes it, the SHA-256 of each file that it lists; of what
    `save_model` wrote, the checksum of each tensor.

    Raises:
        CheckpointError: there is no checkpoint, nothing to compare with, or its run is unfinished.
    """
    path = Path(path)
    if (path / WORK / STATE).exists():
        raise CheckpointError(
            f"{path}: an unfinished run of quantize_checkpoint is there; run the same command again to "
            "finish it"
        )
    if (path / MANIFEST).is_file():
        return _by_manifest(path)
    return _by_checksums(path)


def _by_manifest(path: Path) -> list[Verified]:
    try:
        listed: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())["files"]
        wanted = {name: (int(info["bytes"]), str(info["sha256"])) for name, info in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error!r}") from error
    found = [_compared(path / name, *wanted[name]) for name in sorted(wanted)]
    strangers = sorted({file.name for file in path.glob("*.safetensors")} - wanted.keys())
    for name in strangers:
        problem = f"it is not listed in {MANIFEST}"
        found.append(Verified(name, (path / name).stat().st_size, "sha256", problem))
    return found


def _compared(file: Path, nbytes: int, sha256: str) -> Verified:
    try:
        size, problem = file.stat().st_size, ""
        if size != nbytes:
            problem = f"it has {size} bytes, and had {nbytes}"
        elif (now := hash_of(file)) != sha256:
            problem = f"its SHA-256 is {now}, and was {sha256}"
    except FileNotFoundError:
        size, problem = 0, "it is missing"
    except OSError as error:
        size, problem = 0, f"it cannot be read: {error.strerror or error}"
    return Verified(file.name, size, "sha256", problem)


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
