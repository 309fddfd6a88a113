"""Versions of the whole model: their interleaved times, and what their answers lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf, isfinite, log
from typing import Any

from torch import nn

from ao_core import Config, FqnToConfig, Skip, config_to_dict
from ao_core.ext import ConfigError, shown
from ao_core.ext.calibration import Replacement, Sample, call
from ao_core.ext.quantizing import Decision
from ao_quant.autotuning.cache import machine
from ao_quant.autotuning.layers import Clock, Formats
from ao_quant.autotuning.result import Layer, Whole
from ao_quant.planning.judging import Judge
from ao_quant.planning.text import everywhere_text
from ao_quant.planning.uniform import Everywhere
from ao_quant.timing import Trial

__all__ = ["MIXED", "Bench", "Model", "ModelUse", "chosen", "finalists", "whole_models"]

#: what a version is called in which groups of layers have been exchanged
MIXED = "mixed"
#: recipes for all layers that are timed again, with more rounds, before one is chosen
_FINALISTS = 3
#: takes the model as it is to be timed; within its context, which is not timed, gives the call that is
ModelUse = Callable[[nn.Module], AbstractContextManager[Callable[[], Any]]]


@dataclass(frozen=True)
class Model:
    """One choice for the whole model."""

    name: str
    #: by the name of a weight; None: it stays dense
    formats: Mapping[str, Config | None]

    @property
    def config(self) -> FqnToConfig:
        """As a configuration for `quantize_`."""
        return FqnToConfig({**self.formats, "*": None})


def whole_models(layers: Sequence[Layer], uniform: Sequence[Everywhere]) -> list[Model]:
    """Dense, and each recipe for all layers that can have it."""
    found = [Model("dense", {layer.fqn: None for layer in layers})]
    for each in uniform:
        formats = {
            layer.fqn: config if layer.can_have(config) else None
            for layer in layers
            for config in [each.formats[layer.fqn]]
        }
        if any(formats.values()):
            found.append(Model(everywhere_text(each, uniform), formats))
    return found


@dataclass(frozen=True)
class Bench:
    """The model, what it is timed on, and what its answers are compared with."""

    model: nn.Module
    entries: Sequence[Decision]
    sample: Sample
    judge: Judge
    use: ModelUse | None
    formats: Formats
    clock: Clock
    #: of the layers, for times on disk
    layers: Sequence[Layer]

    def loss(self, model: Model, at_most: float = inf) -> float:
        """What the answers lose, in nats per position or as noise over signal; inf: more than `at_most`."""
        unit = log(2.0) if self.judge.measure == "kl" else 1.0
        replacements = self._replacements(model)
        if not replacements:
            return 0.0
        found = unit * self.judge.error(replacements, at_most=at_most / unit)
        return found if isfinite(found) else inf

    def longer(self) -> Bench:
        """One that takes times with three times as many rounds."""
        return replace(self, clock=self.clock.longer())

    def seconds(self, models: Sequence[Model]) -> list[float]:
        """The time of each, interleaved."""
        device = next(iter(self.entries)).tensor.device
        run = (
            ((lambda: call(self.model, self.sample, "example_input"), 1),)
            if self.use is None
            else ()
        )
        use, inner = self.use, self.model
        bound = None if use is None else (lambda: _context(use, inner))
        trials = [
            Trial("", each.name, run, device, self._replacements(each), bound) for each in models
        ]
        key = {
            "machine": machine(device),
            "layers": [[list(layer.shape), list(layer.uses)] for layer in self.layers],
            "models": [[each.name, config_to_dict(each.config)] for each in models],
            "compiled": self.clock.compiled,
            "rounds": self.clock.rounds,
        }
        # what a function of the caller's does is unknown, and no key says it
        clock = (
            self.clock
            if use is None
            else replace(self.clock, cache=replace(self.clock.cache, folder=None))
        )
        return clock.seconds(key, trials, [each.name for each in models])[0]

    def _replacements(self, model: Model) -> list[Replacement]:
        found: list[Replacement] = []
        for entry in self.entries:
            if (config := model.formats[entry.fqn]) is not None:
                new = self.formats.of(entry, config)
                assert not isinstance(new, Skip)
                found.append((entry.owners, new))
        return found


def _context(use: ModelUse, model: nn.Module) -> AbstractContextManager[Callable[[], Any]]:
    try:
        found = use(model)
    except TypeError as error:
        raise ConfigError(
            f"use={shown(use)}: it cannot be called with the model alone: {error}"
        ) from error
    if not hasattr(found, "__enter__"):
        raise ConfigError(
            f"use={shown(use)}: it returned a {type(found).__name__}, and a context manager is needed, whose "
            "value is the call that is timed"
        )
    return found


def finalists(wholes: Sequence[Whole], max_loss: float) -> list[int]:
    """The places of dense, which is first, and of the fastest whose answers are good enough."""
    fitting = [
        i for i, each in enumerate(wholes) if i and not _unfit(each, wholes[0], max_loss, 0.0)
    ]
    return [0, *sorted(fitting, key=lambda i: wholes[i].seconds)[:_FINALISTS]]


def chosen(
    wholes: Sequence[Whole], final: Sequence[int], max_loss: float, min_speedup: float
) -> tuple[list[Whole], int]:
    """The wholes with the reasons why they were not chosen, and the place of the one that was.

    It is the fastest of the `final` ones whose answer is good enough.
    """
    told = [replace(each, reason=_unfit(each, wholes[0], max_loss, min_speedup)) for each in wholes]
    fitting = [i for i in final if not told[i].reason]
    picked = min(fitting, key=lambda i: (told[i].seconds, told[i].loss, i))
    return [
        replace(each, reason="another is faster") if not each.reason and i != picked else each
        for i, each in enumerate(told)
    ], picked


def _unfit(each: Whole, dense: Whole, max_loss: float, min_speedup: float) -> str:
    if each.config is None:
        return ""
    if not each.loss <= max_loss:
        return f"loses more than max_loss={max_loss:g}"
    if each.seconds * min_speedup > dense.seconds:
        return f"{dense.seconds / each.seconds:.2f}× dense is less than {min_speedup:g}×"
    return ""
