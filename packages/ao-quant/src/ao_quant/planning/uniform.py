"""One format for all weights, compared with a plan: predicted and measured errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum, isfinite

from ao_core import Config
from ao_quant.planning.judging import Whole
from ao_quant.planning.result import Choice, QuantizationPlan, Uniform

__all__ = ["best_measured", "corrected", "uniform_picks"]

#: a uniform recipe whose prediction is more times what the plan was measured at is not measured
_FAR = 8.0
#: groups of weights whose predictions are compared with a measurement; others take the mean of these
_GROUPS = 8
#: a uniform recipe that loses more times what the plan does is not measured to the end
_MORE = 2.0
#: factors by which measurements may change predictions at most: a few positions are no certainty
_TRUST = 10.0


def uniform_picks(choices: Sequence[Choice], config: Config) -> list[int]:
    """The options that have this format; dense where a weight cannot have it."""
    return [
        next((i for i, o in enumerate(choice.options) if o.config == config), 0)
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
    configs: Sequence[Config],
    picked: Callable[[Sequence[int]], QuantizationPlan],
    whole: Whole | None,
) -> QuantizationPlan:
    """The plan, or one format for all weights where that fits as well and is better.

    Args:
        found: a plan, measured already where anything is.
        configs: the formats.
        picked: the plan of some options, with its size.
        whole: measures what decides; None: what is predicted does.
    """
    best, uniform = found, list[Uniform]()
    for config in configs:
        other = picked(uniform_picks(found.choices, config))
        error: float | None = other.error
        if whole is not None:
            error = _measured(found, other, whole)
            other = other.having(measured=error)
        uniform.append(Uniform(config, other.bytes, other.error, other.measured, other.speed))
        if error is None or not found.fits(other):
            continue
        good = error <= found.limit if found.goal == "max_kl" else error < _error(best)
        if good and (found.goal != "max_kl" or other.bytes < best.bytes):
            best = other
    return best.having(uniform=uniform)


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
