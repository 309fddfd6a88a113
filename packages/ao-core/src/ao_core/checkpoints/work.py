"""The directory in which an unfinished run keeps its work: locked, and looked at before anything is done."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ao_core.checkpoints.files import WORK, check_empty
from ao_core.checkpoints.job import Job
from ao_core.checkpoints.state import STATE, State, job_id, load_state, save_state
from ao_core.errors import CheckpointError, ConfigError
from ao_core.regular_files import not_a_file
from ao_core.report import Report
from ao_core.tensor.saving.commit import make_dirs

__all__ = ["clear", "delete", "locked", "other_run", "remove_work", "working"]

_LOCK = "lock"
#: how often a lock is tried that another process removes meanwhile, and seconds in between
_TRIES, _PAUSE = 50, 0.01
_log = logging.getLogger("ao_core")


@contextmanager
def working(target: Path, job: Job, overwrite: bool) -> Iterator[tuple[Path, State]]:
    """The directory of an unfinished run, its state, and a lock that only one process has.

    What is there is looked at when no other process can change it any more.

    Raises:
        ConfigError: another process is at work, or the target has something else and `overwrite` is not
            set.
    """
    work = target / WORK
    with locked(work):
        identity = job_id(job)
        try:
            state = _resumed(target, work, job, identity, overwrite)
        except ConfigError:
            if not os.path.lexists(work / STATE):
                remove_work(work)
            raise
        if state is None:
            clear(work)
            state = State(identity)
            save_state(work, state)
        for file in list(work.iterdir()):
            if not_a_file(file) or file.is_symlink():  # no run leaves such a thing
                delete(file)
        yield work, state


def _resumed(
    target: Path, work: Path, job: Job, identity: dict[str, object], overwrite: bool
) -> State | None:
    """The state that a run of the same job left; None: there is none, and one may begin."""
    try:
        state = load_state(work)
        if state is not None and state.job == identity:
            _check_shards(state, job)
            return state
    except CheckpointError as error:  # damaged: what it says of the pieces is lost with it
        if not overwrite:
            check_empty(target)
        _log.info("quantize_checkpoint begins anew: %s", error)
        return None
    if overwrite:
        return None
    if state is None:
        check_empty(target)
        return None
    raise other_run(target, state.job, identity)


def other_run(target: Path, there: Mapping[str, object], job: Mapping[str, object]) -> ConfigError:
    """The error of a job where another one has begun; both by what they depend on."""
    other = " and ".join(key for key in job if there.get(key) != job[key])
    return ConfigError(
        f"DST {target} has an unfinished run with another {other}; repeat that command to finish it, or "
        "pass --overwrite (overwrite=True) to begin anew"
    )


def _check_shards(state: State, job: Job) -> None:
    """Raise `CheckpointError` where a state is not one of this job."""
    if state.shards is None:
        return
    found = [fqn for shard in state.shards for fqn in shard.tensors]
    if found != [step.fqn for step in job.steps]:
        raise CheckpointError(f"{STATE}: state.shards has other tensors than the source")
    if other := [name for name in state.names or () if not job.names.has_tensors(name)]:
        raise CheckpointError(f"{STATE}: state.names={other}, which are no files of tensors")
    try:
        Report.from_json(state.report)
    except ConfigError as error:
        raise CheckpointError(f"{STATE}: state.report: {error}") from error


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Make the directory and keep other processes out, until this one ends in whatever way.

    Not on Windows.
    """
    try:
        import fcntl
    except ImportError:
        make_dirs(work)
        yield
        return
    for _ in range(_TRIES):
        make_dirs(work)
        if os.path.lexists(work / _LOCK) and (
            not_a_file(work / _LOCK) or (work / _LOCK).is_symlink()
        ):
            delete(work / _LOCK)
        try:
            lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:  # another process finished, and removed the directory
            time.sleep(_PAUSE)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(f"DST {work.parent}: another process is writing there now") from error
        if _is_at(lock, work / _LOCK):
            break
        os.close(lock)  # of a process that finished
    else:
        raise ConfigError(f"DST {work.parent}: other processes are writing there now")
    try:
        yield
    finally:
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def clear(work: Path) -> None:
    """Remove what another run left, but not the lock."""
    delete(work / STATE)
    for file in work.iterdir():
        if file.name != _LOCK:
            delete(file)


def remove_work(work: Path) -> None:
    """Remove the directory: first the work, so that a kill leaves it to be finished, and last the lock."""
    for file in work.iterdir():
        if file.name not in (STATE, _LOCK):
            delete(file)
    delete(work / STATE)
    (work / _LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # another process waits for it
        work.rmdir()


def delete(path: Path) -> None:
    """Remove what is there: a file, a link, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
