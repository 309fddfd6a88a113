"""Plans by the time that the model takes: seconds of one token, measured on this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Config, QTensor
from ao_core.ext import ConfigError, repack
from ao_core.ext.calibration import Sample, call, evaluating
from ao_core.ext.quantizing import Decision
from ao_quant.planning.result import QuantizationPlan
from ao_quant.planning.solve import solve
from ao_quant.planning.text import config_text
from ao_quant.planning.uniform import Everywhere, uniform_picks
from ao_quant.timing import Timer, Trial, measure, stopwatch

__all__ = ["Clock", "Speeds", "first_token"]

#: rounds that are counted
_ROUNDS = 15
#: plans that are slower than their weights say, before what is asked for cannot be met
_ATTEMPTS = 6


@dataclass(frozen=True)
class Clock:
    """The model, an input whose answer is one token, and weights in formats."""

    model: nn.Module
    sample: Sample
    planned: Sequence[Decision]
    made: Callable[[Decision, Config], Tensor]
    timer: Timer = stopwatch

    def seconds(self, plans: Sequence[QuantizationPlan]) -> list[float]:
        """What one call takes with each plan, in interleaved rounds."""
        device = next(iter(self.planned)).tensor.device
        run = ((lambda: call(self.model, self.sample, "timed"), 1),)
        trials = [Trial("", str(n), run, device, self._of(p)) for n, p in enumerate(plans)]
        with evaluating(self.model):
            return measure(trials, self.timer, _ROUNDS)

    def _of(self, plan: QuantizationPlan) -> list[tuple[Any, Tensor]]:
        configs: Mapping[str, Config | None] = {c.fqn: c.option.config for c in plan.choices}
        found: list[tuple[Any, Tensor]] = []
        for entry in self.planned:
            if (config := configs[entry.fqn]) is not None:
                new = self.made(entry, config)
                found.append((entry.owners, repack(new) if isinstance(new, QTensor) else new))
        return found


@dataclass(frozen=True)
class Speeds:
    """Times of the model dense and in each format, and of plans between them."""

    clock: Clock
    #: by the options picked, seconds of one token
    known: dict[tuple[int, ...], float]
    #: of each option of each choice: its share of the time of a model
    costs: list[list[float]]

    @classmethod
    def of(cls, dense: QuantizationPlan, uniform: Sequence[Everywhere], clock: Clock) -> Speeds:
        """Times of one format everywhere are measured; a weight's share of them is that of its elements.

        A token reads every weight once, so that the time goes with their number; what is not planned takes
        the same in all of them.
        """
        none = [0] * len(dense.choices)
        picks = [none, *(uniform_picks(dense.choices, each.formats) for each in uniform)]
        seconds = clock.seconds([dense.picking(each) for each in picks])
        known = {tuple(each): time for each, time in zip(picks, seconds, strict=True)}
        sizes = [prod(choice.shape) for choice in dense.choices]
        total = max(sum(sizes), 1)
        costs = [
            [seconds[0] * size / total] * len(c.options)
            for size, c in zip(sizes, dense.choices, strict=True)
        ]
        alike = [
            (pick, time)
            for pick, time, each in zip(picks[1:], seconds[1:], uniform, strict=True)
            if each.heads
        ]
        for each, time in alike:
            able = sum(size for size, pick in zip(sizes, each, strict=True) if pick)
            # of a model in which some weights stay dense, what the others take
            own = (time - seconds[0] * (1 - able / total)) / max(able, 1)
            for row, size, pick in zip(costs, sizes, each, strict=True):
                if pick:
                    row[pick] = max(own, 0.0) * size
        return cls(clock, known, costs)

    def tokens_per_second(self, picks: Sequence[int]) -> float | None:
        """What was measured of a plan; None: it was not."""
        seconds = self.known.get(tuple(picks))
        return None if seconds is None else 1 / seconds

    def plan(self, dense: QuantizationPlan, *, checked: bool = True) -> QuantizationPlan:
        """The least error at `dense.limit` tokens per second; measured, unless it need not be.

        Raises:
            ConfigError: not even the fastest formats are fast enough.
        """
        errors = [[option.error for option in choice.options] for choice in dense.choices]
        wanted = limit = 1 / dense.limit
        for _ in range(_ATTEMPTS):
            picks = solve(errors, self.costs, limit)
            if picks is None:
                break
            found = dense.picking(picks)
            if not checked:
                return found
            if tuple(picks) not in self.known:
                self.known[tuple(picks)] = self.clock.seconds([found])[0]
            if (seconds := self.known[tuple(picks)]) <= wanted:
                return found
            # shares do not quite add up: allow as much less as it was more
            limit *= min(0.98, wanted / seconds)
        best = min(self.known, key=lambda each: self.known[each])
        if self.known[best] <= wanted:
            return dense.picking(best)
        used = dict.fromkeys(c.options[i].config for c, i in zip(dense.choices, best, strict=True))
        raise ConfigError(
            f"tokens_per_second={dense.limit:g} cannot be met: the fastest that was measured is "
            f"{1 / self.known[best]:.4g}, with {', '.join(map(config_text, used))}; give at most that, or "
            "faster candidates"
        )


def first_token(batch: Sample) -> Sample | None:
    """An input with the first token of the first text of a batch; None where it has no tokens (N, T)."""
    leaves = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    tokens = leaves.get("input_ids")
    if (
        not isinstance(tokens, Tensor)
        or tokens.dim() != 2
        or tokens.dtype not in (torch.int32, torch.int64)
    ):
        return None
    if not isinstance(batch, Mapping):
        return tokens[:1, :1]
    like = tokens.shape
    return {
        name: leaf[:1, :1] if isinstance(leaf, Tensor) and leaf.shape == like else leaf
        for name, leaf in batch.items()
    }
