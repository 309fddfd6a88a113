"""From what layers of a cache lose to a plan: the best choice within a budget of bytes or divergence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, fsum

from ao_core.ext import ConfigError
from ao_hf.cache.functions import solving
from ao_hf.cache.plans import CachePlan

__all__ = ["chosen"]

#: plans for `max_kl` that are measured, as long as they diverge more together than their sum says
_ATTEMPTS = 8
#: factors by which measurements may change losses at most
_TRUST = 10.0


def chosen(dense: CachePlan, error: Callable[[Sequence[int]], float]) -> CachePlan:
    """The best of the plans that losses lead to, and of the recipes for all layers, by what is measured.

    Args:
        dense: with all options, of which none is chosen, and with all recipes for all layers.
        error: the divergence of the answers with these options.

    Raises:
        ConfigError: not even the smallest recipes fit.
    """
    count = len(dense.choices)
    tried = {(pick,) * count: each.measured for pick, each in enumerate(dense.uniform, 1)}
    tried[(0,) * count] = 0.0

    def measured(picks: Sequence[int]) -> float:
        if tuple(picks) not in tried:
            tried[tuple(picks)] = error(picks)
        return tried[tuple(picks)]

    losses = [[option.loss for option in choice.options] for choice in dense.choices]
    for values in (losses, _corrected(dense, losses)):
        if dense.goal == "max_kl":
            _below(dense, values, measured)
        else:
            measured(_within(dense, values))
    size = {picks: _bytes(dense, picks) for picks in tried}
    if dense.goal == "max_kl":
        fits = [picks for picks, found in tried.items() if found <= dense.limit]
        best = min(fits, key=lambda picks: (size[picks], tried[picks]))
    else:
        fits = [picks for picks in tried if size[picks] <= _most(dense)]
        best = min(fits, key=lambda picks: (tried[picks], size[picks]))
    return dense.picking(best, tried[best])


def _corrected(dense: CachePlan, losses: list[list[float]]) -> list[list[float]]:
    """Losses as they are with all layers in a recipe: each recipe's multiplied by measured over added."""
    factors = [1.0]
    for each in dense.uniform:
        ratio = each.measured / each.loss if each.loss > 0 else 1.0
        factors.append(min(max(ratio, 1 / _TRUST), _TRUST))
    return [[x * by for x, by in zip(row, factors, strict=True)] for row in losses]


def _most(dense: CachePlan) -> float:
    """The budget in bytes per token."""
    elements = sum(choice.elements for choice in dense.choices)
    return dense.limit * elements / 8 if dense.goal == "bits" else dense.limit


def _sizes(dense: CachePlan) -> list[list[float]]:
    return [[option.bytes_per_token for option in choice.options] for choice in dense.choices]


def _bytes(dense: CachePlan, picks: Sequence[int]) -> float:
    return fsum(row[pick] for row, pick in zip(_sizes(dense), picks, strict=True))


def _within(dense: CachePlan, losses: list[list[float]]) -> list[int]:
    """The options of least sum within the budget."""
    sizes = _sizes(dense)
    picks = solving().solve(losses, sizes, _most(dense))
    if picks is not None:
        return picks
    least = fsum(map(min, sizes))
    unit = "bytes per token"
    if dense.goal == "bits":
        elements = sum(choice.elements for choice in dense.choices)
        least, unit = ceil(8e4 * least / elements) / 1e4, "bits per element"
    raise ConfigError(
        f"{dense.goal}={dense.limit:g} cannot be met: the smallest that these candidates can is {least:g} "
        f"{unit}; give at least that, or smaller candidates"
    )


def _below(
    dense: CachePlan, losses: list[list[float]], measured: Callable[[Sequence[int]], float]
) -> None:
    """Measure plans of few bytes until one diverges by at most the limit."""
    limit = dense.limit
    for _ in range(_ATTEMPTS):
        picks = solving().solve(_sizes(dense), losses, limit)
        assert picks is not None  # exact layers lose nothing
        error = measured(picks)
        if error <= dense.limit:
            return
        # losses do not quite add up: allow as much less as they were more
        limit *= max(0.1, min(0.9, 0.95 * dense.limit / error))
