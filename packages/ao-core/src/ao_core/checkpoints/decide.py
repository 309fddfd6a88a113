"""From a checkpoint and a configuration to a job, decided from headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ao_core.checkpoints.convert import planned
from ao_core.checkpoints.folders import check_folder
from ao_core.checkpoints.job import Job, Step
from ao_core.checkpoints.skeleton import make_skeleton
from ao_core.config import ConfigLike, resolve_config
from ao_core.errors import CheckpointError, ConfigError
from ao_core.targets import Decision, decide
from ao_core.tensor.saving import Entry, open_checkpoint
from ao_core.tensor.saving.write import natural, parse_size

__all__ = ["make_job"]


def make_job(
    src: str | os.PathLike[str],
    config: ConfigLike,
    *,
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
    limit, config = parse_size(max_shard_size), resolve_config(config)
    config.check()
    check_folder(Path(src))
    checkpoint = open_checkpoint(src)
    if missing := checkpoint.missing_providers():
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(missing)}")
    skeleton = make_skeleton(checkpoint)
    plans = decide(skeleton, config, (lambda module, fqn: True) if include else None)
    of_entry = {
        checkpoint.ties.get(entry.fqn, entry.fqn): entry
        for entry in _choose(plans, include, exclude)
    }
    names: dict[str, list[str]] = {fqn: [fqn] for fqn in checkpoint.entries}
    for name, owner in checkpoint.ties.items():
        names[owner].append(name)
    steps = [
        _step(sorted(names[fqn], key=natural), entry, of_entry.get(fqn))
        for fqn, entry in checkpoint.entries.items()
    ]
    steps.sort(key=lambda step: natural(step.fqn))
    _try_out(steps)
    return Job(checkpoint, config, tuple(include), tuple(exclude), limit, tuple(steps))


def _try_out(steps: Sequence[Step]) -> None:
    """Raise if a configuration cannot give a checkpoint, before any weight is read."""
    for step in {step.plan.config: step for step in steps if step.plan and step.wanted}.values():
        planned(step)


def _step(names: list[str], entry: Entry, decide: Decision | None) -> Step:
    if decide is not None:
        reason = decide.reason
    elif entry.spec is not None:
        reason = f"it is quantized already ({entry.spec})"
    else:
        reason = f"its dtype is {entry.dtype}"
    return Step(names[0], tuple(names[1:]), entry, decide, reason)


def _choose(
    plans: list[Decision], include: Sequence[str], exclude: Sequence[str]
) -> list[Decision]:
    """The plans with what the patterns leave out marked as kept."""
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
            reason = _unlike_a_weight(entry)
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
