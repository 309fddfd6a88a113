"""`quantize_checkpoint`: from a checkpoint to a quantized one, tensor by tensor, whatever kills it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ao_core.checkpoints.decide import make_job
from ao_core.checkpoints.files import (
    WORK,
    check_target,
    copy_files,
    write_manifest,
    write_reports,
)
from ao_core.checkpoints.job import Job, Step
from ao_core.checkpoints.join import hash_of, join, shards_of, written
from ao_core.checkpoints.pieces import open_piece, piece_path, pieces_of, write_piece
from ao_core.checkpoints.progress import bar, check_progress
from ao_core.checkpoints.state import STATE, State, job_id, load_state, save_state
from ao_core.config import Config, config_to_dict
from ao_core.errors import CheckpointError, ConfigError, QuantizationError
from ao_core.progress import Progress
from ao_core.report import Report
from ao_core.tensor.saving.checkpoint import INDEX
from ao_core.tensor.saving.commit import make_dirs, publish, shard_names, write_index

__all__ = ["quantize_checkpoint", "run"]

_LOCK = "lock"
_log = logging.getLogger("ao_core")


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    config: Config | str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: Progress = None,
) -> Report:
    """Quantize a checkpoint without its model, one tensor at a time.

    The result is byte for byte what loading the checkpoint into its model, `quantize_` and `save_model`
    give. Peak memory, beyond what the process has before, is twice the largest tensor and 256 MB
    (`plan_checkpoint` says it in advance). A run that was killed, or that found the disk full, goes
    on where it was when it is called again. Other files of the source are copied, and reports and
    hashes for `verify_checkpoint` are written beside the result.

    Args:
        src: a directory of safetensors files as Hugging Face has them, an index, or one file.
        dst: the directory to write; created where it does not exist.
        config: a configuration, the name of a recipe, or a `FqnToConfig`.
        include: regular expressions; quantize the tensors whose name has a match, whatever they are,
            and no others.
        exclude: regular expressions; keep the tensors whose name has a match.
        max_shard_size: as for `save_model`.
        overwrite: write into a directory that has files; an older checkpoint in it is replaced at
            once when the new one is complete.
        progress: True for a bar, or a function called with (bytes done, bytes in all, name).

    Returns:
        A report with one record for each tensor of the source.

    Raises:
        CheckpointError: the source is damaged, incomplete or needs a plugin that is missing; or the
            disk is full, or it failed: call again to go on.
        ConfigError: `dst` has files, is `src`, or has an unfinished run of something else; the
            configuration cannot work, or a name or pattern of it matches nothing.
        QuantizationError: a weight has NaN or inf values. Nothing is left behind.
    """
    job = make_job(src, config, include=include, exclude=exclude, max_shard_size=max_shard_size)
    return run(job, dst, overwrite=overwrite, progress=progress)


def run(
    job: Job,
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress = None,
    title: str = "",
) -> Report:
    """Do a job that was planned, as `quantize_checkpoint` does; `title` is for the report."""
    source, target = job.checkpoint.path, Path(dst)
    check_target(source, target, overwrite)
    check_progress(progress)
    _log.info("quantize_checkpoint: %s", job.memory_text())
    new = not target.exists()
    try:
        with _work(target, job, overwrite) as (work, state):
            try:
                return _finish(job, target, work, state, progress, title)
            except (ConfigError, QuantizationError):
                # the same command can only fail again
                shutil.rmtree(work)
                raise
    except OSError as error:
        raise CheckpointError(
            f"{target}: could not write: {error.strerror or error}. What is done is kept in "
            f"{target / WORK}: run the same command again to go on. A checkpoint that was in "
            f"{target} is not damaged"
        ) from error
    finally:
        if new:
            with suppress(OSError):  # it is not empty
                target.rmdir()


@contextmanager
def _work(target: Path, job: Job, overwrite: bool) -> Iterator[tuple[Path, State]]:
    """The directory of an unfinished run, its state, and a lock that only one process has."""
    work, identity = target / WORK, job_id(job)
    make_dirs(work)
    with _locked(work):
        state = load_state(work)
        if state is not None and state.job != identity:
            if not overwrite:
                raise ConfigError(
                    f"DST {target} has an unfinished run with another {_difference(state, identity)}; "
                    "repeat that command to finish it, or pass --overwrite (overwrite=True) to begin anew"
                )
            _clear(work)
            state = None
        if state is None:
            state = State(identity)
            save_state(work, state)
        yield work, state


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Keep other processes out, until this one ends in whatever way; not on Windows."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"DST {work.parent}: another process is writing there now") from error
    finally:
        os.close(lock)


def _difference(state: State, identity: dict[str, object]) -> str:
    keys = [key for key in identity if state.job.get(key) != identity[key]]
    return " and ".join(keys)


def _finish(
    job: Job, target: Path, work: Path, state: State, progress: Progress, title: str
) -> Report:
    """Go through all phases, each from where it was left."""
    pieces = pieces_of(job.steps)
    if state.names is None:
        state = _checked(work, state)
        _make_pieces(job, work, state, pieces, progress)
        if state.shards is None:
            state = _divided(job, work, state, pieces)
        state = _joined(job, work, state, pieces, progress)
    assert state.shards is not None
    assert state.names is not None
    publish(target, work, state.names)
    hashes = {
        name: str(shard.sha256) for name, shard in zip(state.names, state.shards, strict=True)
    }
    if len(hashes) > 1:
        hashes[INDEX] = hash_of(target / INDEX)
    copy_files(job.checkpoint.path, target)
    report = Report.from_json(state.report)
    write_reports(report, target, title or job.checkpoint.path.name)
    write_manifest(job, target, hashes)
    _remove(work)
    return report


def _checked(work: Path, state: State) -> State:
    """The state without shards whose file is not what was written."""
    for number, shard in enumerate(state.shards or ()):
        path = work / str(number)
        if shard.sha256 is not None and not (path.exists() and hash_of(path) == shard.sha256):
            state = state.with_hash(number, None)
    return state


def _make_pieces(
    job: Job,
    work: Path,
    state: State,
    pieces: Sequence[tuple[Step, ...]],
    progress: Progress,
) -> None:
    """Write the pieces that are not there and that a file still needs."""
    needed = _needed(state, pieces)
    total = sum(step.entry.nbytes for number in needed for step in pieces[number])
    there = [n for n in needed if piece_path(work, n).exists()]
    done = sum(step.entry.nbytes for number in there for step in pieces[number])
    with bar(progress, "quantize", done, total) as advance:
        for number in needed:
            if number not in there:
                write_piece(job, pieces[number], piece_path(work, number), advance)


def _needed(state: State, pieces: Sequence[tuple[Step, ...]]) -> list[int]:
    """Numbers of the pieces with a tensor of which no file is written."""
    if state.shards is None:
        return list(range(len(pieces)))
    open_ = {fqn for shard in state.shards if shard.sha256 is None for fqn in shard.tensors}
    return [n for n, steps in enumerate(pieces) if any(step.fqn in open_ for step in steps)]


def _divided(job: Job, work: Path, state: State, pieces: Sequence[tuple[Step, ...]]) -> State:
    """The state with what each file will have, and with the report on all tensors."""
    opened = [open_piece(piece_path(work, number)) for number in range(len(pieces))]
    records = tuple(record for piece in opened for record in piece.report)
    report = Report(config_to_dict(job.config), records).to_json()
    shards = shards_of(opened, job.max_shard_size)
    state = replace(state, shards=shards, report=report)
    save_state(work, state)
    return state


def _joined(
    job: Job,
    work: Path,
    state: State,
    pieces: Sequence[tuple[Step, ...]],
    progress: Progress,
) -> State:
    """The state with all files written and named; pieces go as soon as no file needs them."""
    assert state.shards is not None
    numbers = {step.fqn: number for number, steps in enumerate(pieces) for step in steps}
    left = sum(shard.nbytes for shard in state.shards if shard.sha256 is None)
    # a function was told that all is done when all was quantized
    with bar(progress is True, "write", 0, left) as advance:
        for number, shard in enumerate(state.shards):
            used = {numbers[fqn] for fqn in shard.tensors}
            if shard.sha256 is None:
                opened = {n: open_piece(piece_path(work, n)) for n in used}
                piece_of = {fqn: opened[numbers[fqn]] for fqn in shard.tensors}
                path = work / str(number)
                sha256 = join(path, shard.tensors, piece_of, job.ties, advance)
                state = state.with_hash(number, sha256)
                save_state(work, state)
            for n in used.difference(_needed(state, pieces)):
                piece_path(work, n).unlink(missing_ok=True)
    files = [written(work / str(number)) for number in range(len(state.shards or ()))]
    names = shard_names(work.parent, files)
    if len(names) > 1:
        (work / INDEX).unlink(missing_ok=True)
        write_index(work / INDEX, dict(zip(names, files, strict=True)))
    state = replace(state, names=tuple(names))
    save_state(work, state)
    return state


def _clear(work: Path) -> None:
    """Remove what another run left, but not the lock."""
    (work / STATE).unlink(missing_ok=True)
    for file in work.iterdir():
        if file.name != _LOCK:
            file.unlink()


def _remove(work: Path) -> None:
    """Remove the directory of a finished run; its state last, so that a kill leaves it to be finished."""
    for file in work.iterdir():
        if file.name != STATE:
            file.unlink()
    (work / STATE).unlink()
    work.rmdir()
