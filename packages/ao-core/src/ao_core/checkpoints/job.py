"""What is to be done with a checkpoint: a step for each of its tensors, decided from headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ao_core.checkpoints.skeleton import make_skeleton
from ao_core.config import Config, resolve_config
from ao_core.errors import CheckpointError, ConfigError
from ao_core.report import size_text
from ao_core.targets import Plan, plan
from ao_core.tensor.saving import Checkpoint, Entry, open_checkpoint
from ao_core.tensor.saving.write import natural, parse_size

__all__ = ["SLACK", "Job", "Step", "make_job"]

#: memory beyond twice the largest tensor: rows in work, small tensors that wait, buffers of files
SLACK = 256 * 10**6


@dataclass(frozen=True)
class Step:
    """A tensor of the source, tied ones once."""

    #: the first of its names in natural order, under which it is written
    fqn: str
    #: its other names
    tied: tuple[str, ...]
    #: what the source has
    entry: Entry
    #: of a dense float; its configuration is None where it is kept
    plan: Plan | None
    #: why it is kept; empty where it is to be quantized
    reason: str

    @property
    def wanted(self) -> bool:
        """Whether it is to be quantized."""
        return self.plan is not None and self.plan.config is not None


@dataclass(frozen=True)
class Job:
    """A checkpoint, a configuration, and what follows from them."""

    checkpoint: Checkpoint
    config: Config
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    #: bytes
    max_shard_size: int
    #: in natural order of their names
    steps: tuple[Step, ...]

    @property
    def ties(self) -> dict[str, str]:
        """Names that stand for the tensor of another name."""
        pairs = [(name, step.fqn) for step in self.steps for name in step.tied]
        return dict(sorted(pairs, key=lambda pair: natural(pair[0])))

    @property
    def largest(self) -> Step | None:
        """The tensor with the most bytes."""
        return max(self.steps, key=lambda step: step.entry.nbytes, default=None)

    @property
    def peak_memory(self) -> int:
        """Bytes of memory that the work takes at most, beyond what the process has before it."""
        return 2 * (self.largest.entry.nbytes if self.largest else 0) + SLACK

    def memory_text(self) -> str:
        """That in words."""
        of = f"{self.largest.fqn}, {size_text(self.largest.entry.nbytes)}" if self.largest else "none"
        return (
            f"at most {size_text(self.peak_memory)} beside what the process has: twice the largest "
            f"tensor ({of}) and {size_text(SLACK)}"
        )


def make_job(
    src: str | os.PathLike[str],
    config: Config | str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
) -> Job:
    """Decide for each tensor of a checkpoint what becomes of it; reads headers only.

    Raises:
        CheckpointError: the source cannot be read, is damaged, or needs a plugin that is missing.
        ConfigError: a name or pattern matches nothing, a pattern or size is none.
        UnknownNameError: no such recipe.
    """
    limit, config = parse_size(max_shard_size), resolve_config(config)
    checkpoint = open_checkpoint(src)
    if missing := checkpoint.missing_providers():
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(missing)}")
    skeleton = make_skeleton(checkpoint)
    plans = plan(skeleton, config, (lambda module, fqn: True) if include else None)
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
    return Job(checkpoint, config, tuple(include), tuple(exclude), limit, tuple(steps))


def _step(names: list[str], entry: Entry, plan: Plan | None) -> Step:
    if plan is not None:
        reason = plan.reason
    elif entry.spec is not None:
        reason = f"it is quantized already ({entry.spec})"
    else:
        reason = f"its dtype is {entry.dtype}"
    return Step(names[0], tuple(names[1:]), entry, plan, reason)


def _choose(plans: list[Plan], include: Sequence[str], exclude: Sequence[str]) -> list[Plan]:
    """The plans with what the patterns leave out marked as kept."""
    names = [[owner.fqn for owner in entry.owners] for entry in plans]
    included = _matches("include", include, names)
    excluded = _matches("exclude", exclude, names)
    chosen = []
    for i, entry in enumerate(plans):
        reason = ""
        if i in excluded:
            reason = "exclude leaves it out"
        elif include and i not in included:
            reason = "include does not match it"
        elif not include and (hint := _unlike_a_weight(entry)):
            reason = hint
        chosen.append(
            replace(entry, config=None, reason=reason) if reason and entry.config else entry
        )
    return chosen


def _unlike_a_weight(entry: Plan) -> str:
    """Why a tensor of three dimensions is not taken for the weights of experts."""
    last = entry.owners[0].name
    if entry.tensor.dim() != 3 or last.endswith(("weight", "_proj")) or "experts" in entry.fqn:
        return ""
    return f"its name ends in {last!r}, not in weight or _proj; include it to quantize it"


def _matches(option: str, patterns: Sequence[str], names: list[list[str]]) -> set[int]:
    """Indices of the tensors one of whose names has a match."""
    found = set()
    for pattern in patterns:
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{option} {pattern}: no valid regular expression: {error}") from error
        hits = {i for i, group in enumerate(names) if any(map(regex.search, group))}
        if not hits:
            shown = ", ".join(group[0] for group in names[:5])
            raise ConfigError(f"{option} {pattern}: matches no tensor; there are {shown}, …")
        found |= hits
    return found
