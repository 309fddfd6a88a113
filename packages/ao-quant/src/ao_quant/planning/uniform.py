"""One format for all weights, compared with a plan: predicted and measured errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum

from ao_core import Config
from ao_quant.planning.result import Choice, QuantizationPlan, Uniform

__all__ = ["best_measured", "corrected", "uniform_picks"]

#: a uniform recipe whose prediction is more times what the plan was measured at is not measured
_FAR = 8.0
#: groups of weights whose predictions are compared with a measurement; others take the mean of these
_GROUPS = 8

#: factors by which measurements may change predictions at most: a few positions are no certainty
_TRUST = 10.0

#: what the model loses with a plan, or with the part of it that is of some weights
Measured = Callable[[QuantizationPlan, "frozenset[str] | None"], float]


def uniform_picks(choices: Sequence[Choice], config: Config) -> list[int]:
    """The options that have this format; dense where a weight cannot have it."""
    return [
        next((i for i, o in enumerate(choice.options) if o.config == config), 0)
        for choice in choices
    ]


def corrected(
    dense: QuantizationPlan, start: QuantizationPlan, measured: Measured
) -> QuantizationPlan:
    """The plan's errors with what measurements of groups of weights say, and `checks` with them.

    Weights of one shape are a group, which predictions err alike on: they are quantized together as in
    `start`, and all errors of the group are multiplied by what is measured over what is predicted.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, choice in enumerate(start.choices):
        if choice.option.error > 0:
            groups[choice.shape].append(place)
    predicted = {
        shape: fsum(start.choices[i].option.error for i in at) for shape, at in groups.items()
    }
    points: list[tuple[float, float]] = []
    factors: dict[tuple[int, ...], float] = {}
    for shape in sorted(groups, key=lambda shape: -predicted[shape])[:_GROUPS]:
        names = frozenset(start.choices[i].fqn for i in groups[shape])
        found = measured(start, names)
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
    configs: Sequence[Config],
    picked: Callable[[Sequence[int]], QuantizationPlan],
    measured: Measured | None,
) -> QuantizationPlan:
    """The plan, or one format for all weights where that fits as well and is better.

    Args:
        found: a plan, measured already where anything is.
        configs: the formats.
        picked: the plan of some options, with its size.
        measured: what decides; None: what is predicted does.
    """
    best, uniform = found, list[Uniform]()
    for config in configs:
        other = picked(uniform_picks(found.choices, config))
        error = other.error if measured is None else None
        if measured is not None and found.fits(other) and other.error <= _FAR * _error(found):
            error = measured(other, None)
            other = other.having(measured=error)
        uniform.append(Uniform(config, other.bytes, other.error, other.measured, other.speed))
        if error is None or not found.fits(other):
            continue
        good = error <= found.limit if found.goal == "max_kl" else error < _error(best)
        if good and (found.goal != "max_kl" or other.bytes < best.bytes):
            best = other
    return best.having(uniform=uniform)


def _error(plan: QuantizationPlan) -> float:
    return plan.error if plan.measured is None else plan.measured
