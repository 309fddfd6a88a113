"""One recipe for all weights, compared with a plan: predicted and measured errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import fsum, isfinite
from typing import NamedTuple

from torch import nn

from ao_core import Config
from ao_core.ext.quantizing import Decision, FilterFn, decide
from ao_quant.planning.judging import Whole
from ao_quant.planning.result import Choice, QuantizationPlan, Uniform

__all__ = [
    "Everywhere",
    "best_measured",
    "corrected",
    "everywhere",
    "formats_of",
    "uniform_picks",
]

#: a uniform recipe whose prediction is more times what the plan was measured at is not measured
_FAR = 8.0
#: groups of weights whose predictions are compared with a measurement; others take the mean of these
_GROUPS = 8
#: a uniform recipe that loses more times what the plan does is not measured to the end
_MORE = 2.0
#: factors by which measurements may change predictions at most: a few positions are no certainty
_TRUST = 10.0


class Everywhere(NamedTuple):
    """One recipe for all weights."""

    config: Config
    #: whether output heads have it too; else they have what `quantize_` gives them
    heads: bool
    #: by the name of a weight; None: it stays dense
    formats: Mapping[str, Config | None]


def everywhere(
    model: nn.Module,
    configs: Sequence[Config],
    planned: Sequence[Decision],
    filter_fn: FilterFn | None,
) -> list[Everywhere]:
    """Each candidate as `quantize_` applies it, and where that spares output heads also on these."""
    found = []
    for config in configs:
        decided = {entry.fqn: entry.config for entry in decide(model, config, filter_fn)}
        formats = {entry.fqn: decided[entry.fqn] for entry in planned}
        spared = any(other not in (config, None) for other in formats.values())
        if spared:
            found.append(Everywhere(config, False, formats))
        found.append(Everywhere(config, True, dict.fromkeys(formats, config)))
    return found


def formats_of(fqn: str, configs: Sequence[Config], uniform: Sequence[Everywhere]) -> list[Config]:
    """The candidates for one weight: all of them, and what `quantize_` makes of them for an output head."""
    found = (config for each in uniform if (config := each.formats[fqn]) is not None)
    return list(dict.fromkeys((*configs, *found)))


def uniform_picks(choices: Sequence[Choice], formats: Mapping[str, Config | None]) -> list[int]:
    """The options that have these formats; dense where a weight cannot have its."""
    return [
        next((i for i, o in enumerate(choice.options) if o.config == formats[choice.fqn]), 0)
        for choice in choices
    ]


def corrected(dense: QuantizationPlan, start: QuantizationPlan, whole: Whole) -> QuantizationPlan:
    """The plan's errors with what measurements of groups of weights say, and `checks` with them.

    Weights of one shape are a group, which predictions err alike on: they are quantized together as in
    `start`, and all errors of the group are multiplied by what is measured over what is predicted. The
    groups are measured on a part of the data, and `start` on all of it, which says how the two compare.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, choice in enumerate(start.choices):
        if choice.option.error > 0:
            groups[choice.shape].append(place)
    predicted = {
        shape: fsum(start.choices[i].option.error for i in at) for shape, at in groups.items()
    }
    measured, of_part = whole.errors(start)
    share = measured / of_part if of_part > 0 else 1.0
    points: list[tuple[float, float]] = []
    factors: dict[tuple[int, ...], float] = {}
    for shape in sorted(groups, key=lambda shape: -predicted[shape])[:_GROUPS]:
        names = frozenset(start.choices[i].fqn for i in groups[shape])
        found = share * whole.error_of(start, names)
        points.append((predicted[shape], found))
        factors[shape] = min(max(found / predicted[shape], 1 / _TRUST), _TRUST)
    common = fsum(factors.values()) / max(len(factors), 1) or 1.0
    choices = [
        replace(choice, options=tuple(replace(o, error=o.error * by) for o in choice.options))
        for choice in dense.choices
        for by in [factors.get(choice.shape, common)]
    ]
    return dense.having(choices=choices, checks=points)


def best_measured(
    found: QuantizationPlan,
    uniform: Sequence[Everywhere],
    picked: Callable[[Sequence[int]], QuantizationPlan],
    whole: Whole | None,
) -> QuantizationPlan:
    """The plan, or one recipe for all weights where that fits as well and is better.

    Args:
        found: a plan, measured already where anything is.
        uniform: the recipes.
        picked: the plan of some options, with its size.
        whole: measures what decides; None: what is predicted does.
    """
    best, rows = found, list[Uniform]()
    for each in uniform:
        other = picked(uniform_picks(found.choices, each.formats))
        error: float | None = other.error
        if whole is not None:
            error = _measured(found, other, whole)
            other = other.having(measured=error)
        row = Uniform(each.config, other.bytes, other.error, other.measured, other.speed)
        rows.append(replace(row, heads=each.heads))
        if error is None or not found.fits(other):
            continue
        good = error <= found.limit if found.goal == "max_kl" else error < _error(best)
        if good and (found.goal != "max_kl" or other.bytes < best.bytes):
            best = other
    return best.having(uniform=rows)


def _measured(found: QuantizationPlan, other: QuantizationPlan, whole: Whole) -> float | None:
    """What the model loses with one format for all weights; None: it does not fit, or loses far more."""
    if not found.fits(other) or other.error > _FAR * _error(found):
        return None
    error = whole.error(other, at_most=_MORE * max(_error(found), _limit(found)))
    return error if isfinite(error) else None


def _limit(plan: QuantizationPlan) -> float:
    return plan.limit if plan.goal == "max_kl" else 0.0


def _error(plan: QuantizationPlan) -> float:
    return plan.error if plan.measured is None else plan.measured
