"""What is to be done with a checkpoint: a step for each of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.config import Config
from ao_core.report import size_text
from ao_core.targets import Decision
from ao_core.tensor.saving import Checkpoint, Entry
from ao_core.tensor.saving.write import natural

__all__ = ["SLACK", "Job", "Step"]

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
    plan: Decision | None
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
    #: how it is known what module has each tensor
    modules: str = ""

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
        of = (
            f"{self.largest.fqn}, {size_text(self.largest.entry.nbytes)}"
            if self.largest
            else "none"
        )
        return (
            f"at most {size_text(self.peak_memory)} beside what the process has: twice the largest "
            f"tensor ({of}) and {size_text(SLACK)}"
        )
