"""The error of the model's answers with some of its weights in other formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ao_core import Config
from ao_core.ext.calibration import Replacement, Sample, answer
from ao_core.ext.quantizing import Decision
from ao_quant.planning.measure import distance, ratio
from ao_quant.planning.result import QuantizationPlan

__all__ = ["Judge", "Whole"]

#: positions of answers that are compared: batches beyond that are left out
_POSITIONS = 2048


@dataclass(frozen=True)
class Judge:
    """A model, some batches, and what it answers to them."""

    model: nn.Module
    batches: tuple[Sample, ...]
    right: tuple[Tensor, ...]
    #: "output" or "kl"
    measure: str

    @classmethod
    def of(
        cls, model: nn.Module, batches: Sequence[Sample], *, measure: str, name: str = "sample"
    ) -> Judge:
        """The judge by as many batches, of the argument `name`, as give enough positions; at least one.

        Raises:
            ConfigError: the model cannot be called with them.
        """
        right: list[Tensor] = []
        for batch in batches:
            right.append(answer(model, batch, name=name))
            if sum(each.numel() // max(each.shape[-1], 1) for each in right) >= _POSITIONS:
                break
        return cls(model, tuple(batches[: len(right)]), tuple(right), measure)

    def error(self, replacements: Sequence[Replacement]) -> float:
        """The error of the answers with some parameters replaced."""
        compare = distance(self.measure)
        sums = [
            compare(right, answer(self.model, batch, replacements))
            for batch, right in zip(self.batches, self.right, strict=True)
        ]
        return ratio(sum(amount for amount, _ in sums), sum(of for _, of in sums))


@dataclass(frozen=True)
class Whole:
    """Runs of the whole model as plans have it."""

    planned: Sequence[Decision]
    judge: Judge
    #: a weight in a format
    made: Callable[[Decision, Config], Tensor]

    def error(self, found: QuantizationPlan, only: frozenset[str] | None = None) -> float:
        """What the model loses with a plan, or with the part of it that is of these weights."""
        configs: Mapping[str, Config | None] = {c.fqn: c.option.config for c in found.choices}
        replacements = [
            (entry.owners, self.made(entry, config))
            for entry in self.planned
            if (config := configs[entry.fqn]) is not None and (only is None or entry.fqn in only)
        ]
        return self.judge.error(replacements)
