"""What is to be done with a checkpoint: a step for each of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ao_core.calibration.needing import SEQUENCE, algorithm_of
from ao_core.calibration.samples import Sample
from ao_core.checkpoints.homes import Home, Step
from ao_core.config import Config, config_to_dict
from ao_core.report import Report, size_text
from ao_core.targets import Decision
from ao_core.tensor.saving import Checkpoint
from ao_core.tensor.saving.names import MODEL, FileNames, names_of_files
from ao_core.tensor.saving.write import natural

__all__ = ["SLACK", "Calibration", "Job", "Preparing"]

#: memory beyond twice the largest tensor: rows in work, small tensors that wait, buffers of files
SLACK = 256 * 10**6


@dataclass(frozen=True)
class Calibration:
    """The model of a checkpoint on the meta device, and the data that it is run on."""

    model: nn.Module
    #: gives buffers that are in no file their values
    fill_buffers: Callable[[], None]
    batches: tuple[Sample, ...]
    #: on all parameters of the model
    decisions: tuple[Decision, ...]
    #: by the name of a decision, where the files have its parameter
    homes: Mapping[str, Home]
    #: name of a buffer -> name of the tensor in the files
    buffers: Mapping[str, str]
    #: a hash of the data
    digest: str
    #: bytes at most, beyond what the process has
    peak_memory: int
    #: that in words
    memory: str

    @property
    def visited(self) -> list[Decision]:
        """The decisions that need data."""
        return [entry for entry in self.decisions if algorithm_of(entry.config) is not None]


@dataclass(frozen=True)
class Preparing:
    """Transforms of a model, which come before its weights are quantized."""

    #: all that was asked for
    configs: tuple[Config, ...]
    #: the transforms
    before: tuple[Config, ...]
    batches: tuple[Sample, ...]
    #: a hash of the data
    digest: str
    #: bytes at most, beyond what the process has and what is mapped
    peak_memory: int
    #: that in words
    memory: str


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
    #: how it is known what module has each tensor
    modules: str = ""
    #: where the configuration needs data
    calibration: Calibration | None = None
    #: how the data was drawn of a file, for the lock; empty: it was given as batches
    drawn: Mapping[str, Any] = field(default_factory=dict)
    #: what is done to the model before; None: nothing
    preparing: Preparing | None = None
    #: the job of which this is what is left, once the model is transformed, and reports on that
    origin: Job | None = None
    before: tuple[Report, ...] = ()

    @property
    def first(self) -> Job:
        """The job that was asked for: this one, or the one of which it is what is left."""
        return self.origin or self

    @property
    def configs(self) -> tuple[Config, ...]:
        """What was asked for."""
        preparing = self.first.preparing
        return (self.config,) if preparing is None else preparing.configs

    @property
    def asked(self) -> dict[str, Any]:
        """What was asked for, in the form of `config_to_dict`; of several those of all."""
        each = [config_to_dict(config) for config in self.configs]
        return each[0] if len(each) == 1 else {SEQUENCE: each}

    @property
    def digest(self) -> str:
        """A hash of the data; empty: there are none."""
        found = self.first.preparing or self.calibration
        return "" if found is None else found.digest

    @property
    def names(self) -> FileNames:
        """What the files of the result are called: as those of the source, which its readers look for."""
        found = names_of_files(self.checkpoint.path)
        return MODEL if found is None else found.without_variant()

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
        most = self._tensor_memory
        if self.calibration is not None:
            most = max(most, self.calibration.peak_memory)
        return most if self.preparing is None else max(most, self.preparing.peak_memory)

    @property
    def _tensor_memory(self) -> int:
        return 2 * (self.largest.entry.nbytes if self.largest else 0) + SLACK

    def memory_text(self) -> str:
        """That in words."""
        if self.preparing is not None:
            return f"{self.preparing.memory}; then {replace(self, preparing=None).memory_text()}"
        if self.calibration is not None:
            return self.calibration.memory
        of = (
            f"{self.largest.fqn}, {size_text(self.largest.entry.nbytes)}"
            if self.largest
            else "none"
        )
        return (
            f"at most {size_text(self.peak_memory)} beside what the process has: twice the largest "
            f"tensor ({of}) and {size_text(SLACK)}"
        )
