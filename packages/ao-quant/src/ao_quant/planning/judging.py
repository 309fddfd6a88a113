"""The error of the model's answers with some of its weights in other formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from torch import Tensor, nn

from ao_core import Config
from ao_core.ext.calibration import Replacement, Sample, answer, call, evaluating
from ao_core.ext.quantizing import Decision
from ao_quant.planning.measure import distance, positions, ratio, size
from ao_quant.planning.result import QuantizationPlan

__all__ = ["MOST", "Judge", "Whole", "measure_of"]

#: what may be lost where no limit is given, by measure: nats per position, or 20 dB
MOST = {"kl": 0.05, "output": 0.01}

#: positions of answers that are compared: batches beyond that are left out
_POSITIONS = 2048
#: positions by which groups of weights are compared with each other
_PART = 512


def measure_of(model: nn.Module, sample: Sample, name: str) -> str:
    """Divergence where the model answers with `logits`, else noise over signal.

    Raises:
        ConfigError: the model cannot be called with the sample, the argument of that name.
    """
    with evaluating(model):
        out = call(model, sample, name)
    return "kl" if isinstance(getattr(out, "logits", None), Tensor) else "output"


@dataclass(frozen=True)
class Judge:
    """A model, some batches, and what it answers to them."""

    model: nn.Module
    batches: tuple[Sample, ...]
    right: tuple[Tensor, ...]
    #: what the error of each answer is divided by
    sizes: tuple[float, ...]
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
            if sum(map(positions, right)) >= _POSITIONS:
                break
        sizes = tuple(size(measure, each) for each in right)
        return cls(model, tuple(batches[: len(right)]), tuple(right), sizes, measure)

    def error(
        self, replacements: Sequence[Replacement], *, part: bool = False, at_most: float = inf
    ) -> float:
        """The error of the answers with some parameters replaced.

        Args:
            replacements: the parameters.
            part: by the first batches alone, which are enough to compare errors with each other.
            at_most: inf is returned where the error is above. Errors of batches only add up, so that this is
                known before the last one.
        """
        of, total = sum(self.sizes[: self._part] if part else self.sizes), 0.0
        for amount in self._amounts(replacements, self._part if part else len(self.batches)):
            total += amount
            if not ratio(total, of) <= at_most:
                return inf
        return ratio(total, of)

    def errors(self, replacements: Sequence[Replacement]) -> tuple[float, float]:
        """The error by all batches, and that by the first alone, of one run."""
        found, first = list(self._amounts(replacements, len(self.batches))), self._part
        return ratio(sum(found), sum(self.sizes)), ratio(
            sum(found[:first]), sum(self.sizes[:first])
        )

    def _amounts(self, replacements: Sequence[Replacement], count: int) -> Iterator[float]:
        compare = distance(self.measure)
        for batch, right in zip(self.batches[:count], self.right, strict=False):
            yield compare(right, answer(self.model, batch, replacements))

    @property
    def _part(self) -> int:
        """How many of the batches give enough positions to compare errors with each other."""
        ends = accumulate(map(positions, self.right))
        return sum(end < _PART for end in ends) + 1

    @property
    def positions(self) -> int:
        """Positions of the answers that are compared."""
        return sum(map(positions, self.right))


@dataclass(frozen=True)
class Whole:
    """Runs of the whole model as plans have it."""

    planned: Sequence[Decision]
    judge: Judge
    #: a weight in a format
    made: Callable[[Decision, Config], Tensor]

    def error(self, found: QuantizationPlan, at_most: float = inf) -> float:
        """What the model loses with a plan; inf: more than `at_most`."""
        return self.judge.error(self._replaced(found), at_most=at_most)

    def errors(self, found: QuantizationPlan) -> tuple[float, float]:
        """What the model loses with a plan, by all batches and by the first alone."""
        return self.judge.errors(self._replaced(found))

    def error_of(self, found: QuantizationPlan, only: frozenset[str]) -> float:
        """What the model loses with these weights of a plan, by the first batches."""
        return self.judge.error(self._replaced(found, only), part=True)

    def _replaced(
        self, found: QuantizationPlan, only: frozenset[str] | None = None
    ) -> list[Replacement]:
        configs: Mapping[str, Config | None] = {c.fqn: c.option.config for c in found.choices}
        return [
            (entry.owners, self.made(entry, config))
            for entry in self.planned
            if (config := configs[entry.fqn]) is not None and (only is None or entry.fqn in only)
        ]
