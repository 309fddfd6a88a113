"""`replay_checkpoint`: what a lock says was done, done again, and the first thing that is not as it was."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ao_core.arguments import checked_but
from ao_core.calibration.inputs import Data
from ao_core.checkpoints.decide import make_job
from ao_core.checkpoints.job import Job
from ao_core.checkpoints.run import run
from ao_core.errors import ConfigError
from ao_core.progress import Progress
from ao_core.tensor.saving.checkpoint import open_checkpoint
from ao_core.tensor.saving.hashes import first_difference, tensor_hashes
from ao_core.tensor.saving.lock import Done, Lock, read_lock, versions_of

__all__ = ["Replayed", "replay_checkpoint"]


class Replayed(NamedTuple):
    """What came of a replay."""

    #: what differs first, in words: an input, and then nothing is written, or a tensor of the result; empty:
    #: nothing does
    first: str
    #: versions that are not those of the lock, in words
    notes: tuple[str, ...] = ()


@checked_but("data")
def replay_checkpoint(
    lock: str | os.PathLike[str],
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    data: Data | None = None,
    progress: Progress = None,
) -> Replayed:
    """Quantize a checkpoint as another one was, and compare the tensors with those that it had then.

    Before anything is written, the tensors of the source and the calibration data are compared with what the
    lock says of them. The source is read twice. What several configurations made in turn goes through folders
    next to `dst`, which are removed.

    Args:
        lock: an `ao.lock.json`, or a folder with one.
        src: the checkpoint of the original, as for `quantize_checkpoint`.
        dst: the directory to write; created where it does not exist.
        data: the calibration data, where the lock says that there were some.
        progress: as for `quantize_checkpoint`.

    Raises:
        CheckpointError: the lock or the source cannot be read.
        ConfigError: the lock is of no quantization, or of one that needs the model in memory; or data are
            missing.
    """
    known, target = read_lock(Path(lock)), Path(dst)
    _check(known, data)
    notes = _other_versions(known)
    with ExitStack() as folders:
        for number, step in enumerate(known.steps):
            last = number == len(known.steps) - 1
            job = _job(known, step, src, data)
            if number == 0 and known.source:
                first = first_difference(known.source, tensor_hashes(job.checkpoint))
                if first:
                    return Replayed(f"in SRC, {first}", notes)
            if job.digest != step.data:
                first = f"the calibration data are others: their hash is {job.digest}, and was {step.data}"
                return Replayed(first, notes)
            place = target if last else Path(folders.enter_context(_next_to(target)))
            run(job, place, progress=progress)
            src = place
    made = tensor_hashes(open_checkpoint(target))
    first = first_difference(known.tensors, made)
    return Replayed(f"in DST, {first}" if first else "", notes)


def _next_to(target: Path) -> TemporaryDirectory[str]:
    """A folder on the same disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.replay-")


def _check(lock: Lock, data: Data | None) -> None:
    """Raise `ConfigError` unless files and the data are enough."""
    if not lock.steps:
        raise ConfigError("lock: no quantization led to it, so there is nothing to replay")
    if any(step.data for step in lock.steps) and data is None:
        drawn = lock.options.get("data") or {}
        named = f", of the file {drawn['file']!r}" if "file" in drawn else ""
        raise ConfigError(f"data: the lock is of a run with calibration data{named}; give them")


def _job(lock: Lock, step: Done, src: str | os.PathLike[str], data: Data | None) -> Job:
    """One quantization of a lock; data that none of several need are compared too."""
    options: dict[str, Any] = {
        name: lock.options[name]
        for name in ("include", "exclude", "max_shard_size")
        if name in lock.options
    }
    given = data if step.data or len(lock.steps) == 1 else None
    return make_job(src, dict(step.config), data=given, **options)


def _other_versions(lock: Lock) -> tuple[str, ...]:
    """A sentence for each distribution of another version than then."""
    here = versions_of(lock.versions)
    return tuple(
        f"{dist} was {version or 'of this process'}, and is {here[dist] or 'not installed'} here"
        for dist, version in lock.versions.items()
        if here[dist] != version
    )
