"""Transforms of a model that is in files: what they change is written as a checkpoint, which is quantized.

The files are mapped into memory, and so is what is made of them, so that the machine holds no more than it
has room for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ao_core.checkpoints.decide import chosen_of, job_of, whole_model
from ao_core.checkpoints.files import PREPARED, copied_files
from ao_core.checkpoints.folders import write_untied
from ao_core.checkpoints.homes import Step, joined
from ao_core.checkpoints.job import Calibration, Job
from ao_core.checkpoints.state import job_id, write_whole
from ao_core.checkpoints.work import clear, other_run
from ao_core.errors import CheckpointError
from ao_core.folder_records import FolderModel
from ao_core.mapped import mapped_from, spilled, spilling
from ao_core.preparing import changes, prepare, prepared_report
from ao_core.report import ParameterRecord, Report
from ao_core.schema import ANY, TEXT, Fields, Items, SchemaError, Table
from ao_core.steps import STEP_FIELDS
from ao_core.steps import Step as InputStep
from ao_core.targets import Decision
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.tensor.saving import Checkpoint, open_checkpoint
from ao_core.tensor.saving.files import read_json
from ao_core.tensor.saving.header import header_of
from ao_core.tensor.saving.shards import checksum, places_of, store, write_shard

__all__ = ["check_prepared", "prepared_job"]

#: in the folder: the checkpoint, the tensors of input steps that were chosen, and what says that both are
#: complete
_CHECKPOINT, _STEPS, _DONE = "checkpoint", "steps.safetensors", "prepared.json"
_FIELDS = Fields(
    {
        "job": Table(ANY),
        "reports": Items(TEXT),
        "steps": Table(Items(STEP_FIELDS)),
    }
)


def prepared_job(job: Job, work: Path) -> Job:
    """The job of quantizing what the transforms of a job make of its checkpoint.

    That is made in a folder, unless an earlier run has; the caller holds its lock.

    Raises:
        ConfigError: the model is not known, or cannot be transformed.
        OSError: it cannot be written.
    """
    identity, done = job_id(job), _done(work)
    if done is None or done["job"] != identity:
        clear(work)
        _make(job, work, identity)
        done = _done(work)
        assert done is not None
    tensors = open_checkpoint(work / _STEPS)
    steps = {
        name: _read_steps(tensors, name, [InputStep(**each) for each in made])
        for name, made in done["steps"].items()
    }
    preparing = job.preparing
    assert preparing is not None
    batches = None if job.calibration is None else preparing.batches
    folder = work / _CHECKPOINT
    new = job_of(folder, job.config, batches, job.max_shard_size, job.include, job.exclude, steps)
    before = tuple(map(Report.from_json, done["reports"]))
    return replace(new, origin=job, before=before, drawn=job.drawn)


def check_prepared(job: Job, target: Path) -> None:
    """Raise `ConfigError` where a run of another job has left its folder."""
    done, identity = _done(target / PREPARED), job_id(job)
    if done is not None and done["job"] != identity:
        raise other_run(target, done["job"], identity)


def _done(work: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = read_json(work / _DONE, _FIELDS, "prepared")
    except (CheckpointError, SchemaError):
        return None
    return found


def _make(job: Job, work: Path, identity: Mapping[str, Any]) -> None:
    """Transform the model of a checkpoint, and write it."""
    preparing, checkpoint, folder = job.preparing, job.checkpoint, work / _CHECKPOINT
    assert preparing is not None
    folder.mkdir()
    known, calibration = whole_model(job, preparing.batches)
    mapped = _mapping(checkpoint)
    model = calibration.model

    def decided(there: nn.Module, config: Any) -> Sequence[Decision]:
        chosen = chosen_of(replace(known, model=there), config, job.include, job.exclude)
        # by the names of the model alone, at which a transform looks for modules
        own = {name for name, _ in there.named_parameters(remove_duplicate=False)}
        return [replace(e, owners=tuple(o for o in e.owners if o.fqn in own)) for e in chosen]

    steps: dict[str, ChosenSteps] = {}
    reports: list[Report] = []
    with spilling(folder):
        _fill(calibration, checkpoint, mapped)
        for config in preparing.before:
            now, notes = prepare(model, config, [job.config], decided, preparing.batches, steps)
            changed = {name for names, _, _ in changes(model, now) for name in names}
            reports.append(prepared_report(now, config, changed, notes))
            model = now
        tensors, untied = _tensors(job, known.names, model, mapped)
        _write(folder / job.names.single, {**tensors, **untied}, _ties(checkpoint, known, model))
    for file in copied_files(checkpoint.path):
        shutil.copyfile(file, folder / file.name)
    if untied:
        write_untied(checkpoint.path, folder)
    _write(work / _STEPS, _step_tensors(steps), {})
    made = {
        "job": dict(identity),
        "reports": [_in_files(report, known.names, job.steps).to_json() for report in reports],
        "steps": {
            name: [{"kind": step.kind, "block": step.block} for step in each.steps]
            for name, each in steps.items()
        },
    }
    write_whole(work / _DONE, json.dumps(made).encode())


def _fill(
    calibration: Calibration, checkpoint: Checkpoint, mapped: Callable[[str], Tensor]
) -> None:
    """Give the model the tensors of the files, none of which is read by that."""

    def stored(step: Step) -> Tensor:
        name = step.entry.fqn
        return checkpoint.load(name) if name in checkpoint.records else mapped(name)

    calibration.fill_buffers()  # while parameters are on the meta device: it gives these values, too
    for entry in calibration.decisions:
        home = calibration.homes[entry.fqn]
        value = joined(home, stored)
        value = value if len(home.parts) == 1 else spilled(value)
        parameter = nn.Parameter(value, requires_grad=False)
        for owner in entry.owners:
            owner.module._parameters[owner.name] = parameter
    for name, tensor in calibration.buffers.items():
        place, _, leaf = name.rpartition(".")
        calibration.model.get_submodule(place)._buffers[leaf] = checkpoint.read(tensor)


def _mapping(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    """Plain tensors of a checkpoint by name, each mapped where it can be, and read where not."""
    places = {path: places_of(path)[1] for path in checkpoint.files}

    def mapped(name: str) -> Tensor:
        slot = checkpoint.slots[name]
        start = places[slot.path][name].start
        found = mapped_from(slot.path, start, slot.dtype, slot.shape)
        return checkpoint.read(name) if found is None else found

    return mapped


def _tensors(
    job: Job, names: Mapping[str, str], model: nn.Module, mapped: Callable[[str], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The plain tensors of the files as the model has them, and parameters that are in none of them any more.

    These were tied, and are not now. They are called as in the model.
    """
    now = _now(model)
    found: dict[str, Tensor] = {}
    written: set[int] = set()
    for step in job.steps:
        whole = now.get(names.get(step.entry.fqn, ""))
        own = None if whole is None else step.of(whole)
        if own is None or tuple(own.shape) != step.entry.shape or step.entry.spec is not None:
            found |= {leaf: mapped(leaf) for leaf in step.entry.leaves}
        else:
            found[step.entry.fqn] = own.detach()
            written.add(id(whole))
    parameters = model.named_parameters()
    return found, {name: p.detach() for name, p in parameters if id(p) not in written}


def _now(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }


def _ties(checkpoint: Checkpoint, known: FolderModel, model: nn.Module) -> dict[str, str]:
    """The names in the files that still stand for the tensor of another name."""
    now, names = _now(model), known.names
    return {
        name: owner
        for name, owner in checkpoint.ties.items()
        if now.get(names.get(name, "")) is now.get(names.get(owner, ""))
    }


def _write(path: Path, tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    stored, raw = store(tensors)
    crcs = {name: checksum(tensor) for name, tensor in stored.items()}
    write_shard(path, stored, header_of({}, dict(ties), raw, crcs))


def _step_tensors(steps: Mapping[str, ChosenSteps]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, each in steps.items():
        if each.in_scale is not None:
            found[f"{name}.in_scale"] = each.in_scale
        for place, part in enumerate(each.low_rank or ()):
            found[f"{name}.low_rank.{place}"] = part
    return found


def _read_steps(tensors: Checkpoint, name: str, steps: Sequence[InputStep]) -> ChosenSteps:
    def read(leaf: str) -> Tensor | None:
        return tensors.read(leaf) if leaf in tensors.slots else None

    b, a = (read(f"{name}.low_rank.{place}") for place in range(2))
    low_rank = None if b is None or a is None else (b, a)
    return ChosenSteps(tuple(steps), read(f"{name}.in_scale"), low_rank)


def _in_files(report: Report, names: Mapping[str, str], steps: Sequence[Step]) -> Report:
    """A report by the names that tensors have in the files, each with its own size."""
    entries = {step.entry.fqn: step.entry for step in steps}
    files: dict[str, list[str]] = {}
    for file, name in names.items():
        files.setdefault(name, []).append(file)
    records: list[ParameterRecord] = []
    for each in report.records:
        found = files.get(each.fqn, [each.fqn])
        if len(found) == 1:
            records.append(replace(each, fqn=found[0]))
            continue
        for file in found:
            entry = entries[file]
            records.append(
                replace(
                    each,
                    fqn=file,
                    shape=entry.shape,
                    bytes_before=entry.nbytes,
                    bytes_after=entry.nbytes,
                )
            )
    return replace(report, records=tuple(records))
