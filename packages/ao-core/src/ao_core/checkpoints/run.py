"""`quantize_checkpoint`: from a checkpoint to a quantized one, tensor by tensor, whatever kills it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ao_core.arguments import checked_but
from ao_core.calibration.inputs import Data
from ao_core.calibration.needing import joined
from ao_core.checkpoints.calibrated import calibrated
from ao_core.checkpoints.calibration import unit_names
from ao_core.checkpoints.convert import Converted
from ao_core.checkpoints.decide import make_job
from ao_core.checkpoints.files import (
    PREPARED,
    WORK,
    check_empty,
    check_names,
    check_target,
    copy_files,
    write_lock,
    write_manifest,
    write_reports,
)
from ao_core.checkpoints.folders import write_others
from ao_core.checkpoints.homes import Step
from ao_core.checkpoints.job import Job
from ao_core.checkpoints.join import hash_of, join, shards_of, written
from ao_core.checkpoints.pieces import DamagedPiece, open_piece, piece_path, pieces_of, write_piece
from ao_core.checkpoints.preparing import check_prepared, prepared_job
from ao_core.checkpoints.progress import bar, check_progress
from ao_core.checkpoints.state import ShardState, State, load_state, save_state
from ao_core.checkpoints.work import delete, locked, remove_work, working
from ao_core.config import ConfigLike, config_to_dict
from ao_core.errors import CheckpointError, ConfigError, GraphError, QuantizationError
from ao_core.progress import Progress
from ao_core.regular_files import not_a_file
from ao_core.report import Report
from ao_core.tensor.saving.checkpoint import open_checkpoint
from ao_core.tensor.saving.commit import publish, shard_names, write_index
from ao_core.tensor.saving.lock import LOCK

__all__ = ["quantize_checkpoint", "run"]

_log = logging.getLogger("ao_core")


@checked_but("data")
def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    config: ConfigLike | Sequence[ConfigLike],
    *,
    data: Data | None = None,
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
        config: a configuration, the name of a recipe, or a `FqnToConfig`; or a list of those of which the
            last quantizes, and the others transform the model before. Then the transformed model is written
            next to the result until that is complete, which takes as much room again.
        data: as for `quantize_`, for configurations that need calibration data. The model must be one that a
            library knows, as ao-hf knows those of transformers. Its blocks are brought to memory one at a
            time, run on the data, quantized, written and freed.
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
    job = make_job(
        src, config, data=data, include=include, exclude=exclude, max_shard_size=max_shard_size
    )
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
    check_target(source, target)
    check_names(job, target)
    check_progress(progress)
    _log.info("quantize_checkpoint: %s", job.memory_text())
    new = not target.exists()
    try:
        if job.preparing is not None:
            return _transformed(job, target, overwrite=overwrite, progress=progress, title=title)
        with working(target, job, overwrite) as (work, state):
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


def _transformed(job: Job, target: Path, *, overwrite: bool, **options: Any) -> Report:
    """Do a job whose model is transformed first."""
    if not overwrite:
        check_prepared(job, target)
        if not os.path.lexists(target / WORK):
            check_empty(target)
    work = target / PREPARED
    with locked(work):
        try:
            report = run(prepared_job(job, work), target, overwrite=overwrite, **options)
        except (ConfigError, GraphError, QuantizationError):
            remove_work(work)  # the same command can only fail again
            raise
        remove_work(work)
    return report


def _finish(
    job: Job, target: Path, work: Path, state: State, progress: Progress, title: str
) -> Report:
    """Go through all phases, each from where it was left."""
    state = _checked(work, state)
    if state.shards is None or any(shard.sha256 is None for shard in state.shards):
        state = _made(job, work, state, progress)
    assert state.shards is not None
    names, shards = _named(job, target, work, state), state.shards
    if names != state.names:
        state = replace(state, names=names)
        save_state(work, state)
    called = job.names
    publish(target, work, names, called)
    hashes = {name: str(shard.sha256) for name, shard in zip(names, shards, strict=True)}
    if called.single not in hashes:
        hashes[called.index] = hash_of(target / called.index)
    copy_files(job.checkpoint.path, target)
    report = Report.from_json(state.report)
    source = job.first.checkpoint.path
    others = write_others(source, target, report)
    write_reports(report, target, title or source.name)
    write_lock(job, target)
    write_manifest(job, target, hashes, [*others, LOCK])
    remove_work(work)
    return report


def _made(job: Job, work: Path, state: State, progress: Progress) -> State:
    """The state with the files of all shards, from pieces."""
    pieces = pieces_of(job.steps, _blocks(job))
    _make_pieces(job, work, state, pieces, progress)
    if state.shards is None:
        state = _divided(job, work, state, pieces)
    try:
        return _joined(job, work, state, pieces, progress)
    except DamagedPiece as error:  # once: on a disk that fails it would not end
        _log.info("quantize_checkpoint makes a damaged piece again: %s", error)
        state = load_state(work) or state
        _make_pieces(job, work, state, pieces, None)
        return _joined(job, work, state, pieces, progress)


def _checked(work: Path, state: State) -> State:
    """The state without shards whose file is not what was written."""
    for number, shard in enumerate(state.shards or ()):
        if shard.sha256 is not None and not _is_shard(_place(work, state, number), shard):
            state = state.with_hash(number, None)
    return state


def _place(work: Path, state: State, number: int) -> Path:
    """Where the file of a shard is: in the work, or moved to where it belongs."""
    path = work / str(number)
    moved = state.names is not None and not os.path.lexists(path)
    return work.parent / state.names[number] if moved and state.names else path


def _is_shard(path: Path, shard: ShardState) -> bool:
    if not_a_file(path) or path.is_symlink() or hash_of(path) != shard.sha256:
        return False
    try:
        return open_checkpoint(path).entries.keys() == set(shard.tensors)
    except CheckpointError:
        return False


def _named(job: Job, target: Path, work: Path, state: State) -> tuple[str, ...]:
    """The names of the files of all shards; the index, if there is one, is written in the work."""
    files = [written(_place(work, state, number)) for number in range(len(state.shards or ()))]
    called = job.names
    names = state.names or tuple(shard_names(target, files, called))
    if names != (called.single,):
        index = work / called.index
        index.unlink(missing_ok=True)
        write_index(index, dict(zip(names, files, strict=True)))
    return names


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
    there = {n for n in needed if _is_whole(piece_path(work, n), pieces[n])}
    done = sum(step.entry.nbytes for number in there for step in pieces[number])
    made: dict[str, Converted] = {}
    text = ""
    with bar(progress, "quantize", done, total) as advance:
        if job.calibration is not None:
            missing = [number for number in needed if number not in there]
            made, text = calibrated(
                job, job.calibration, pieces, sorted(there), missing, work, advance
            )
        for number in needed:
            if number not in there and not os.path.lexists(piece_path(work, number)):
                path = piece_path(work, number)
                write_piece(job, pieces[number], path, advance, made, text)


def _blocks(job: Job) -> list[str]:
    """The blocks that are done one after the other, by the names of their tensors in the files."""
    if job.calibration is None:
        return []
    units = unit_names(job.calibration.model)
    found: dict[str, None] = {}
    for entry in job.calibration.decisions:
        name = job.calibration.homes[entry.fqn].name
        for unit in units:
            inner = entry.fqn.removeprefix(f"{unit}.")
            if inner != entry.fqn and name.endswith(f".{inner}"):
                found[name.removesuffix(f".{inner}")] = None
    return list(found)


def _is_whole(path: Path, steps: Sequence[Step]) -> bool:
    """Whether a piece is there with all its tensors; one that is damaged goes."""
    if not os.path.lexists(path):
        return False
    try:
        if [record.fqn for record in open_piece(path).report] == [step.fqn for step in steps]:
            return True
    except CheckpointError as error:
        _log.info("quantize_checkpoint makes a damaged piece again: %s", error)
    delete(path)
    return False


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
    text = next((piece.report.calibration for piece in opened if piece.report.calibration), "")
    report = Report(config_to_dict(job.config), records, text)
    made = joined(job.configs, job.before, [report]).to_json()
    shards = shards_of(opened, job.max_shard_size)
    state = replace(state, shards=shards, report=made)
    save_state(work, state)
    return state


def _joined(
    job: Job,
    work: Path,
    state: State,
    pieces: Sequence[tuple[Step, ...]],
    progress: Progress,
) -> State:
    """The state with all files written; pieces go as soon as no file needs them."""
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
    return state
