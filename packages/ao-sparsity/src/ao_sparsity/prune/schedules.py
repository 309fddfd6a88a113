"""Gradual pruning: how sparse a model is after so many steps of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ao_core import Config
from ao_core.ext import ConfigError, check_fields, checked
from ao_sparsity.prune.keeping import apply_masks
from ao_sparsity.prune.magnitude import prune_magnitude
from ao_sparsity.prune.patterns import Pattern
from ao_sparsity.prune.result import PruneReport, Pruning

__all__ = ["CubicSchedule", "GradualPruning", "LinearSchedule", "OneShotSchedule", "Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Base of the schedules: number of the step -> sparsity, the final one from `end` on."""

    #: the sparsity at the end
    final: float
    #: the step that reaches it
    end: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final={self.final!r}: need a share from 0 to 1")

    def __call__(self, step: int) -> float:
        """The sparsity after so many steps."""
        raise NotImplementedError


@dataclass(frozen=True)
class OneShotSchedule(Schedule):
    """No pruning before `end`, all of it then."""

    def __call__(self, step: int) -> float:
        """The sparsity after so many steps."""
        return self.final if step >= self.end else 0.0


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """Equal increments per step from `begin` to `end`."""

    begin: int = 0
    #: the sparsity before
    initial: float = 0.0
    _power: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.initial <= self.final or not self.begin < self.end:
            raise ConfigError(
                f"initial={self.initial!r}, begin={self.begin}, end={self.end}: need "
                f"0 <= initial <= final={self.final!r} and begin < end"
            )

    def __call__(self, step: int) -> float:
        """The sparsity after so many steps."""
        left = 1 - min(max(step - self.begin, 0) / (self.end - self.begin), 1)
        return self.final + (self.initial - self.final) * left**self._power


@dataclass(frozen=True)
class CubicSchedule(LinearSchedule):
    """Fast at first, while there is much to choose from (Zhu and Gupta 2017, arXiv 1710.01878)."""

    _power: ClassVar[int] = 3


class GradualPruning:
    """A callback of a training loop: call `step()` after each step of the optimizer.

    `keep_masks` keeps removed weights at zero between its steps.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        pattern: Pattern,
        schedule: Schedule,
        *,
        every: int = 1,
        method: Callable[[Config], Pruning] | None = None,
    ) -> None:
        """Start with nothing pruned.

        Args:
            model: the model that is trained.
            pattern: what is pruned; its sparsity is the schedule's.
            schedule: how much, after so many steps.
            every: steps between two prunings; the end of the schedule is one, in any case.
            method: pattern -> masks: `prune_magnitude` of the model by default. `Movement.prune` is one, and
                ``lambda pattern: prune_wanda(model, data, pattern)``.

        Raises:
            ConfigError: `pattern` is none, or `every` is not positive.
        """
        if every < 1:
            raise ConfigError(f"every={every!r}: need a positive number of steps")
        self._model, self._pattern, self._schedule, self._every = model, pattern, schedule, every
        self._method = method or partial(prune_magnitude, model)
        #: steps so far, and the sparsity that they led to
        self.steps, self.sparsity = 0, 0.0

    def step(self) -> PruneReport | None:
        """Count a step, and prune if it is due. Returns the report if it pruned."""
        self.steps += 1
        sparsity = self._schedule(self.steps)
        due = self.steps % self._every == 0 or sparsity == self._schedule.final
        if not due or sparsity <= self.sparsity:
            return None
        found = self._method(self._pattern.at(sparsity))
        apply_masks(self._model, found)
        self.sparsity = sparsity
        return found.report

    def state_dict(self) -> dict[str, Any]:
        """The progress, to continue from a checkpoint; masks are in the model's state dict."""
        return {"steps": self.steps, "sparsity": self.sparsity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.steps, self.sparsity = int(state["steps"]), float(state["sparsity"])
