"""What a run has done so far, in a file beside its pieces, so that the next one goes on from there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

from ao_core.__about__ import __version__
from ao_core.checkpoints.job import Job
from ao_core.errors import CheckpointError
from ao_core.schema import (
    ANY,
    COUNT,
    FILE_NAME,
    SHA256,
    TEXT,
    Fields,
    Items,
    Optional,
    SchemaError,
    Table,
)
from ao_core.tensor.saving.commit import sync_dir
from ao_core.tensor.saving.files import read_json
from ao_core.tensor.saving.shards import write_file

__all__ = [
    "STATE",
    "ShardState",
    "State",
    "job_id",
    "load_state",
    "save_state",
    "write_whole",
]

STATE = "state.json"
#: what a state must be
_FIELDS = Fields(
    {
        "job": Table(ANY),
        "shards": Optional(
            Items(Fields({"tensors": Items(TEXT), "nbytes": COUNT, "sha256": Optional(SHA256)}))
        ),
        "report": TEXT,
        "names": Optional(Items(FILE_NAME)),
    }
)


@dataclass(frozen=True)
class ShardState:
    """One file of the result."""

    #: names of its tensors
    tensors: tuple[str, ...]
    #: of these
    nbytes: int
    #: of the file, once it is written
    sha256: str | None = None


@dataclass(frozen=True)
class State:
    """How far a run came. The phases are pieces, then shards, then the names that these get."""

    #: what it is a run of, see `job_id`
    job: dict[str, Any]
    #: known when all pieces are there
    shards: tuple[ShardState, ...] | None = None
    #: likewise: the report, as JSON
    report: str = ""
    #: known when all shards are there: from then on they are moved to where they belong
    names: tuple[str, ...] | None = None

    def with_hash(self, number: int, sha256: str | None) -> State:
        """The state after a shard was written, or lost."""
        assert self.shards is not None
        shards = list(self.shards)
        shards[number] = replace(shards[number], sha256=sha256)
        return replace(self, shards=tuple(shards))


def job_id(job: Job) -> dict[str, Any]:
    """All that the bytes of the result depend on; values are ready for JSON."""
    config = job.asked
    stats = {file.name: file.stat() for file in job.checkpoint.files}
    return {
        "versions": _versions(config),
        "config": config,
        "include": list(job.include),
        "exclude": list(job.exclude),
        "max_shard_size": job.max_shard_size,
        "modules": job.modules,
        "data": job.digest,
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def _versions(config: Any) -> dict[str, str]:
    """Versions of ao-core and of who provides the configuration."""
    found = {"ao-core": __version__}
    if isinstance(config, dict):
        if isinstance(dist := config.get("provider"), str) and dist not in found:
            try:
                found[dist] = distributions.version(dist)
            except distributions.PackageNotFoundError:
                found[dist] = ""
        for value in config.values():
            found |= _versions(value)
    if isinstance(config, list):
        for value in config:
            found |= _versions(value)
    return found


def load_state(work: Path) -> State | None:
    """The state of the run that left this directory; None: there is none.

    Raises:
        CheckpointError: it cannot be read, or contradicts itself; names the field.
    """
    path = work / STATE
    if not os.path.lexists(path):
        return None
    try:
        data = read_json(path, _FIELDS, "state")
        shards, names = data["shards"], data["names"]
        if names is not None and len(set(names)) != len(shards or ()):
            raise SchemaError(f"state.names={names} are not the names of {len(shards or ())} files")
    except SchemaError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return State(
        job=data["job"],
        shards=None
        if shards is None
        else tuple(ShardState(tuple(s["tensors"]), s["nbytes"], s["sha256"]) for s in shards),
        report=data["report"],
        names=None if names is None else tuple(names),
    )


def save_state(work: Path, state: State) -> None:
    """Replace the state of a run at once."""
    write_whole(work / STATE, json.dumps(asdict(state)).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once, durably."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.unlink(missing_ok=True)
    write_file(unfinished, [data])
    os.replace(unfinished, path)
    sync_dir(path.parent)
