"""Versions of the whole model, compared: one recipe for all layers, and the best format of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ao_core import Config, FqnToConfig
from ao_core.ext.calibration import Replacement, Sample, answer, call
from ao_core.ext.numerics import error_sums, sqnr_of_sums
from ao_core.ext.quantizing import Decision, convert
from ao_quant.autotuning.result import Layer, Whole
from ao_quant.planning.text import config_text
from ao_quant.timing import Timer, Trial, measure

__all__ = ["MIXED", "compare", "pick", "whole_models"]

#: what the choice of the fastest format of each layer is called
MIXED = "mixed"
#: times of whole models that differ by less than this factor are a tie, which the smaller error decides
_TIE = 1.02


@dataclass(frozen=True)
class Model:
    """One choice for the whole model."""

    name: str
    #: None: dense
    config: FqnToConfig | None


def whole_models(layers: Sequence[Layer], configs: Sequence[Config]) -> list[Model]:
    """Dense, each recipe for all layers that can have it, and the fastest format of each layer."""

    def of(choice: Mapping[str, Config | None]) -> FqnToConfig:
        return FqnToConfig({**choice, "*": None})

    found = [Model("dense", None)]
    for config in configs:
        able = {
            layer.fqn: config
            if any(t.config == config and t.seconds for t in layer.timings)
            else None
            for layer in layers
        }
        if any(able.values()):
            found.append(Model(config_text(config), of(able)))
    mixed = of({layer.fqn: layer.chosen.config for layer in layers})
    if all(mixed != model.config for model in found) and any(x.picked for x in layers):
        found.append(Model(MIXED, mixed))
    return found


def compare(
    model: nn.Module,
    sample: Sample,
    entries: Sequence[Decision],
    models: Sequence[Model],
    timer: Timer,
    rounds: int,
    known: Mapping[str, float] | None,
) -> list[Whole]:
    """The time of each, interleaved, and the error of its answer.

    Args:
        model: as it is called in use, in evaluation mode.
        sample: what it is called with.
        entries: the weights of which models are choices.
        models: dense first.
        timer: of a `Trial`.
        rounds: that are counted.
        known: seconds by name, where they were measured before.
    """
    inner: nn.Module = getattr(model, "_orig_mod", model)
    made = [_replacements(entries, each.config) for each in models]
    answers = [answer(inner, sample, replacements, name="example_input") for replacements in made]
    if known is None:
        device = next(iter(entries)).tensor.device
        trials = [
            Trial("", each.name, ((lambda: call(model, sample, "example_input"), 1),), device, by)
            for each, by in zip(models, made, strict=True)
        ]
        seconds = measure(trials, timer, rounds)
    else:
        seconds = [known[each.name] for each in models]
    return [
        Whole(
            each.name, each.config, time, None if each.config is None else _sqnr(answers[0], found)
        )
        for each, time, found in zip(models, seconds, answers, strict=True)
    ]


def pick(wholes: Sequence[Whole], floor: float, min_speedup: float) -> tuple[list[Whole], int]:
    """The wholes with the reasons why they were not chosen, and the place of the one that was.

    The fastest whose answer is good enough; of those about as fast, the one with the least error.
    """
    told = [replace(each, reason=_unfit(each, wholes[0], floor, min_speedup)) for each in wholes]
    fitting = [i for i, each in enumerate(told) if not each.reason]
    fastest = min(fitting, key=lambda i: (told[i].seconds, i))
    picked = fastest
    if told[fastest].config is not None:
        tied = [
            i for i in fitting if told[i].config and told[i].seconds <= _TIE * told[fastest].seconds
        ]
        picked = max(tied, key=lambda i: (told[i].sqnr_db or 0.0, -told[i].seconds))
    return [
        replace(each, reason="another is faster, or as fast with less error")
        if not each.reason and i != picked
        else each
        for i, each in enumerate(told)
    ], picked


def _unfit(each: Whole, dense: Whole, floor: float, min_speedup: float) -> str:
    if each.config is None:
        return ""
    assert each.sqnr_db is not None
    if not each.sqnr_db >= floor:
        return f"{each.sqnr_db:.1f} dB of the answer are less than {floor:g}"
    if each.seconds * min_speedup > dense.seconds:
        return f"{dense.seconds / each.seconds:.2f}× dense is less than {min_speedup:g}×"
    return ""


def _replacements(entries: Sequence[Decision], config: FqnToConfig | None) -> list[Replacement]:
    choice: Mapping[str, Config | None] = {} if config is None else dict(config.entries)
    found: list[Replacement] = []
    for entry in entries:
        if (wanted := choice.get(entry.fqn)) is not None:
            new, _ = convert(replace(entry, config=wanted), entry.tensor)
            if new is not None:
                found.append((entry.owners, new))
    return found


def _sqnr(right: Tensor, other: Tensor) -> float:
    if not bool(torch.isfinite(other).all()):
        return float("-inf")
    return float(sqnr_of_sums(error_sums(right, other)))
