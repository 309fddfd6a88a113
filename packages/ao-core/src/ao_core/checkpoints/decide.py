"""From a checkpoint and a configuration to a job, decided from headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ao_core.arguments import shown
from ao_core.calibration.inputs import Data, Seen
from ao_core.calibration.needing import check_data, needs_data, resolved
from ao_core.calibration.ranks import OverRanks
from ao_core.calibration.samples import Sample
from ao_core.checkpoints.calibration import calibration_of, transform_memory
from ao_core.checkpoints.convert import planned
from ao_core.checkpoints.folders import check_folder, model_of
from ao_core.checkpoints.homes import Step
from ao_core.checkpoints.job import Calibration, Job, Preparing
from ao_core.checkpoints.skeleton import is_dense, make_skeleton
from ao_core.config import Config, ConfigLike
from ao_core.errors import CheckpointError, ConfigError
from ao_core.folder_records import FolderModel, Place
from ao_core.preparing import stages, with_steps
from ao_core.targets import Decision, FilterFn, decide
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.tensor.saving import Checkpoint, Entry, open_checkpoint
from ao_core.tensor.saving.write import natural, parse_size

__all__ = ["chosen_of", "job_of", "make_job", "whole_model"]


def make_job(
    src: str | os.PathLike[str],
    config: ConfigLike | Sequence[ConfigLike],
    *,
    data: Data | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
) -> Job:
    """Decide for each tensor of a checkpoint what becomes of it; reads headers only.

    Raises:
        CheckpointError: the source cannot be read, is damaged, or needs a plugin that is missing.
        ConfigError: a name or pattern matches nothing, a pattern or size is none, or what a
            configuration makes is not a quantized tensor.
        UnknownNameError: no such recipe.
    """
    limit, configs = parse_size(max_shard_size), resolved(config)
    batches = check_data(configs, data, "quantize_checkpoint(src, dst, config, data=batches)")
    if isinstance(batches, (OverRanks, Seen)):
        raise ConfigError(
            f"data={type(batches).__name__}: files are calibrated by one process, with batches; pass a "
            "list of inputs of the model"
        )
    *before, last = stages(configs)
    if last.prepares or not all(stage.prepares for stage in before):
        raise ConfigError(
            f"config={shown(configs)}: weights of files are quantized by the last configuration, after those "
            "that transform the model, if any; load the model and call quantize_"
        )
    needed = batches if needs_data(last.config) else None
    job = job_of(src, last.config, needed, limit, include, exclude)
    if not before:
        return job
    assert batches is not None
    transforms = tuple(stage.config for stage in before)
    return replace(job, preparing=_preparing(job, tuple(configs), transforms, batches))


def job_of(
    src: str | os.PathLike[str],
    config: Config,
    batches: Sequence[Sample] | None,
    max_shard_size: int,
    include: Sequence[str],
    exclude: Sequence[str],
    chosen_steps: Mapping[str, ChosenSteps] | None = None,
) -> Job:
    """The job of one configuration that quantizes.

    Args:
        src: as for `quantize_checkpoint`.
        config: the configuration.
        batches: of data, where it needs some.
        max_shard_size: bytes.
        include: as for `quantize_checkpoint`.
        exclude: likewise.
        chosen_steps: by the name of a parameter, input steps that it is stored with.
    """
    check_folder(Path(src))
    checkpoint = open_checkpoint(src)
    if missing := checkpoint.missing_providers():
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(missing)}")
    known = model_of(checkpoint.path, [*checkpoint.entries, *checkpoint.ties])
    if isinstance(known, FolderModel):
        modules = f"those of {known.title}"
        chosen = list(with_steps(chosen_of(known, config, include, exclude), chosen_steps or {}))
    else:
        modules = f"guessed from the names of tensors: {known}"
        plans = decide(make_skeleton(checkpoint), config, _filter_of(include))
        chosen = _choose(plans, include, exclude, _unlike_a_weight)
    of_entry = {
        checkpoint.ties.get(owner.fqn, owner.fqn): entry
        for entry in chosen
        for owner in entry.owners
    }
    kept = known.kept if isinstance(known, FolderModel) else {}
    places = _places(known, checkpoint) if isinstance(known, FolderModel) else {}
    names: dict[str, list[str]] = {fqn: [fqn] for fqn in checkpoint.entries}
    for name, owner in checkpoint.ties.items():
        names[owner].append(name)
    steps = [
        _step(
            sorted(names[fqn], key=natural),
            entry,
            of_entry.get(fqn),
            kept.get(fqn, ""),
            places.get(fqn, ()),
        )
        for fqn, entry in checkpoint.entries.items()
    ]
    steps.sort(key=lambda step: natural(step.fqn))
    _try_out(steps)
    calibration = None
    if batches is not None:
        calibration = calibration_of(known, checkpoint, chosen, steps, batches)
    return Job(
        checkpoint,
        config,
        tuple(include),
        tuple(exclude),
        max_shard_size,
        tuple(steps),
        modules,
        calibration,
    )


def _preparing(
    job: Job, configs: tuple[Config, ...], before: tuple[Config, ...], batches: Sequence[Sample]
) -> Preparing:
    """What is done to the model of a checkpoint before it is quantized.

    Raises:
        ConfigError: the model is not known, or cannot be run.
    """
    _, found = whole_model(job, batches)
    memory = transform_memory(found)
    return Preparing(configs, before, tuple(batches), found.digest, *memory)


def whole_model(job: Job, batches: Sequence[Sample]) -> tuple[FolderModel, Calibration]:
    """The model of a job's checkpoint on the meta device, and what is needed to run it.

    Raises:
        ConfigError: it is not known, or cannot be run.
    """
    checkpoint = job.checkpoint
    known = model_of(checkpoint.path, [*checkpoint.entries, *checkpoint.ties])
    chosen = []
    if isinstance(known, FolderModel):
        chosen = chosen_of(known, job.config, job.include, job.exclude)
    found = calibration_of(known, checkpoint, chosen, job.steps, batches)
    assert isinstance(known, FolderModel)  # else that raised
    return known, found


def chosen_of(
    known: FolderModel, config: Config, include: Sequence[str], exclude: Sequence[str]
) -> list[Decision]:
    """The decisions on parameters of a model, with what the patterns leave out marked as kept."""
    return _choose(_known(known, config, _filter_of(include)), include, exclude)


def _places(known: FolderModel, checkpoint: Checkpoint) -> dict[str, Place]:
    """Where tensors of the files lie that are parts of a parameter, as far as the model's library knows."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in known.names.items():
        if name in checkpoint.entries:
            files.setdefault(parameter, {})[name] = tuple(checkpoint.entries[name].shape)
    found: dict[str, Place] = {}
    for parameter, shapes in files.items():
        if len(shapes) > 1:
            found |= known.places(parameter, shapes)
    return found


def _filter_of(include: Sequence[str]) -> FilterFn | None:
    return (lambda module, fqn: True) if include else None


def _known(known: FolderModel, config: Config, filter_fn: FilterFn | None) -> list[Decision]:
    """The decisions on parameters of a model, by the names that they have there and in the files."""
    in_files: dict[str, list[str]] = {}
    for name, parameter in known.names.items():
        in_files.setdefault(parameter, []).append(name)
    decisions = decide(known.model, config, filter_fn, in_files)
    return [d for d in decisions if any(owner.fqn in known.names for owner in d.owners)]


def _try_out(steps: Sequence[Step]) -> None:
    """Raise if a configuration cannot give a checkpoint, before any weight is read."""
    for step in {step.plan.config: step for step in steps if step.plan and step.wanted}.values():
        planned(step)


def _step(
    names: list[str], entry: Entry, decision: Decision | None, kept: str, place: Place
) -> Step:
    if entry.spec is not None:
        decision, reason = None, f"it is quantized already ({entry.spec})"
    elif not is_dense(entry):
        decision, reason = None, f"its dtype is {entry.dtype}"
    elif decision is not None:
        reason = decision.reason
    else:
        reason = kept or "it is no parameter of the model"
    return Step(names[0], tuple(names[1:]), entry, decision, reason, place)


def _choose(
    plans: list[Decision],
    include: Sequence[str],
    exclude: Sequence[str],
    kept: Callable[[Decision], str | None] = lambda entry: None,
) -> list[Decision]:
    """The plans with what the patterns leave out marked as kept, and what `kept` says where none include."""
    names = [[owner.fqn for owner in entry.owners] for entry in plans]
    included = _matches("include", include, names)
    excluded = _matches("exclude", exclude, names)
    chosen = []
    for i, entry in enumerate(plans):
        reason: str | None = None
        if i in excluded:
            reason = "a pattern of exclude leaves it out"
        elif include and i not in included:
            reason = "no pattern of include matches it"
        elif not include:
            reason = kept(entry)
        chosen.append(
            replace(entry, config=None, reason=reason) if reason and entry.config else entry
        )
    return chosen


def _unlike_a_weight(entry: Decision) -> str | None:
    """Why a tensor of three dimensions is not taken for the weights of experts; None where it is."""
    last = entry.owners[0].name
    if entry.tensor.dim() != 3 or last.endswith(("weight", "_proj")) or "experts" in entry.fqn:
        return None
    return f"its name ends in {last!r}, not in weight or _proj; include it to quantize it"


def _matches(option: str, patterns: Sequence[str], names: list[list[str]]) -> set[int]:
    """Indices of the tensors one of whose names has a match."""
    found = set()
    for pattern in patterns:
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{option}={pattern!r}: no valid regular expression: {error}"
            ) from error
        hits = {i for i, group in enumerate(names) if any(map(regex.search, group))}
        if not hits:
            shown = ", ".join(group[0] for group in names[:5])
            raise ConfigError(f"{option}={pattern!r}: matches no tensor; there are {shown}, …")
        found |= hits
    return found
