"""Single layers: the time of each in every format, for exactly the calls that the model makes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ao_core import Config, Skip, config_to_dict
from ao_core.ext import UnsupportedOp
from ao_core.ext.quantizing import Decision, convert
from ao_quant.autotuning.cache import Cache, machine
from ao_quant.autotuning.calls import Uses, bound
from ao_quant.autotuning.result import Layer, Timing
from ao_quant.planning.text import config_text
from ao_quant.timing import ENOUGH, Timer, Trial, measure

__all__ = ["Clock", "Formats", "compact", "timed"]


@dataclass(frozen=True)
class Formats:
    """Weights in formats, each converted once."""

    made: dict[tuple[str, Config], Tensor | Skip] = field(default_factory=dict)

    def of(self, entry: Decision, config: Config) -> Tensor | Skip:
        """A weight in a format, or why it cannot have it."""
        key = (entry.fqn, config)
        if key not in self.made:
            new, record = convert(replace(entry, config=config), entry.tensor)
            self.made[key] = Skip(record.reason) if new is None else new
        return self.made[key]


@dataclass(frozen=True)
class Clock:
    """How times are taken, and where they are kept."""

    timer: Timer
    rounds: int
    #: whether layers are compiled
    compiled: bool
    cache: Cache
    #: seconds after which rounds end
    enough: float = ENOUGH
    #: times that this process knows, by key
    known: dict[str, dict[str, float]] = field(default_factory=dict)

    def longer(self) -> Clock:
        """One that takes three times as many rounds."""
        return replace(self, rounds=3 * self.rounds, enough=3 * self.enough)

    def seconds(
        self, key: Mapping[str, Any], trials: Sequence[Trial], names: Sequence[str]
    ) -> tuple[list[float], bool]:
        """The time of each trial, and whether the disk knew it."""
        text = compact(key)
        if text in self.known:
            return [self.known[text][name] for name in names], False
        stored = self.cache.read(key)
        known = stored is not None and stored.keys() == set(names)
        if stored is None or not known:
            seconds = measure(trials, self.timer, self.rounds, self.enough)
            stored = dict(zip(names, seconds, strict=True))
            self.cache.write(key, stored)
        self.known[text] = stored
        return [stored[name] for name in names], known


def timed(
    entry: Decision, uses: Uses, configs: Sequence[Config], formats: Formats, clock: Clock
) -> Layer:
    """One layer: the time of each format that it can have, dense first."""
    tensor = entry.tensor
    timings, parameters = [Timing(None, None)], [tensor]
    refused = []
    for config in configs:
        new = formats.of(entry, config)
        if isinstance(new, Skip):
            refused.append(Timing(config, None, new.reason))
            continue
        try:
            for use in uses:
                bound(use, new)()
        except UnsupportedOp as error:
            refused.append(Timing(config, None, str(error)))
            continue
        timings.append(Timing(config, None))
        parameters.append(new)
    names = [_name(timing.config) for timing in timings]
    key = {
        "machine": machine(tensor.device),
        "weight": [list(tensor.shape), str(tensor.dtype)],
        "uses": [use.describe() for use in uses],
        "candidates": names,
        "compiled": clock.compiled,
    }
    trials = [
        Trial(
            entry.fqn,
            config_text(timing.config),
            tuple((bound(use, new, compiled=clock.compiled), use.count) for use in uses),
            tensor.device,
        )
        for timing, new in zip(timings, parameters, strict=True)
    ]
    seconds, cached = clock.seconds(key, trials, names)
    return Layer(
        fqn=entry.fqn,
        shape=tuple(tensor.shape),
        uses=tuple(use.describe() for use in uses),
        timings=(
            *(replace(t, seconds=s) for t, s in zip(timings, seconds, strict=True)),
            *refused,
        ),
        picked=0,
        cached=cached,
        tied=tuple(owner.fqn for owner in entry.owners[1:]),
    )


def compact(data: Any) -> str:
    """JSON in one form only, as a key."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _name(config: Config | None) -> str:
    return "dense" if config is None else compact(config_to_dict(config))
