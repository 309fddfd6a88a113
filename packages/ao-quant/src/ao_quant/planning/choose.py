"""From what was measured to a plan: the best choice within a budget of bytes, bits or divergence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from math import ceil, prod
from typing import NamedTuple

from ao_core.ext import ConfigError
from ao_core.ext.reports import size_text
from ao_quant.planning.judging import Whole
from ao_quant.planning.result import QuantizationPlan
from ao_quant.planning.solve import solve
from ao_quant.planning.speed import Speeds
from ao_quant.planning.uniform import Everywhere, best_measured, corrected

__all__ = ["Needs", "chosen"]

#: plans for `max_kl` whose choices diverge more together than their sum says, before all is dense
_ATTEMPTS = 12


class Needs(NamedTuple):
    """What formats cost beside their tensors: who provides one is said once per file."""

    #: of each option of each choice: its providers
    options: list[list[frozenset[str]]]
    #: bytes of the files beside the choices, without what their formats need
    base: int
    #: and what each provider adds
    charges: dict[str, int]

    def fixed(self, picks: Iterable[int]) -> int:
        """Bytes of the files beside the choices, with these options picked."""
        named = (options[pick] for options, pick in zip(self.options, picks, strict=True))
        used: frozenset[str] = reduce(frozenset.union, named, frozenset())
        return self.base + sum(self.charges[name] for name in used)


def chosen(
    dense: QuantizationPlan,
    needs: Needs,
    uniform: Sequence[Everywhere],
    whole: Whole | None,
    speeds: Speeds | None = None,
    *,
    predicted: bool,
) -> QuantizationPlan:
    """The best plan, compared with each recipe applied to all weights.

    Args:
        dense: with all options, of which none is chosen yet.
        needs: beside the tensors.
        uniform: one candidate for all weights, each.
        whole: to measure plans; None: nothing can be.
        speeds: of models with plans; None: nothing is timed.
        predicted: whether errors are predictions, which measurements correct first.
    """

    def picked(picks: Sequence[int]) -> QuantizationPlan:
        speed = None if speeds is None else speeds.tokens_per_second(picks)
        return dense.picking(picks, fixed=needs.fixed(picks)).having(speed=speed)

    def found() -> QuantizationPlan:
        if speeds is not None:
            return speeds.plan(dense)
        if dense.goal == "max_kl":
            assert whole is not None
            return _below_divergence(dense, whole)
        return _within_budget(dense, needs) if dense.goal == "budget" else _within_bits(dense)

    if predicted and whole is not None and dense.choices:
        start = _start(dense, needs) if speeds is None else speeds.plan(dense, checked=False)
        dense = corrected(dense, start, whole)
    best = found()
    best = picked(best.picks).having(measured=best.measured)
    if whole is None:
        return best_measured(best, uniform, picked, None)
    if best.measured is None:
        best = best.having(measured=whole.error(best))
    return best_measured(best, uniform, picked, whole)


def _start(dense: QuantizationPlan, needs: Needs) -> QuantizationPlan:
    """The plan by what was predicted; for a divergence, one that is predicted to have it."""
    if dense.goal == "budget":
        return _within_budget(dense, needs)
    if dense.goal == "bits":
        return _within_bits(dense)
    sizes = [[option.bytes for option in choice.options] for choice in dense.choices]
    picks = solve(sizes, _errors(dense), dense.limit)
    assert picks is not None  # dense has no error
    return dense.picking(picks)


def _within_budget(dense: QuantizationPlan, needs: Needs) -> QuantizationPlan:
    """The least error in files of at most `dense.limit` bytes.

    Raises:
        ConfigError: not even the smallest formats fit.
    """
    sizes = [[option.bytes for option in choice.options] for choice in dense.choices]

    def best(limit: float) -> QuantizationPlan | None:
        room = limit - needs.base
        picks = solve(_errors(dense), sizes, room, needs.options, needs.charges)
        return None if picks is None else dense.picking(picks, fixed=needs.fixed(picks))

    found = best(dense.limit)
    if found is not None:
        return found
    lightest = [row.index(min(row)) for row in sizes]
    smallest = dense.picking(lightest, fixed=needs.fixed(lightest))
    # others may be smaller together, because they need fewer formats
    low = needs.base + sum(map(min, sizes))
    while low < smallest.bytes:
        middle = (low + smallest.bytes) // 2
        found = best(middle)
        low, smallest = (middle + 1, smallest) if found is None else (low, found)
    raise ConfigError(
        f"budget={int(dense.limit)} bytes cannot be met: the smallest that these candidates can is "
        f"{smallest.bytes} bytes ({size_text(smallest.bytes)}), of which {smallest.fixed} are not "
        "planned; give at least that, or smaller candidates"
    )


def _within_bits(dense: QuantizationPlan) -> QuantizationPlan:
    """The least error in at most `dense.limit` bits per weight.

    Raises:
        ConfigError: not even the smallest formats fit.
    """
    sizes = [[option.data for option in choice.options] for choice in dense.choices]
    weights = sum(prod(choice.shape) for choice in dense.choices)
    picks = solve(_errors(dense), sizes, dense.limit * weights / 8)
    if picks is not None:
        return dense.picking(picks)
    smallest = ceil(8e4 * sum(map(min, sizes)) / max(weights, 1)) / 1e4
    raise ConfigError(
        f"bits={dense.limit:g} cannot be met: the smallest that these candidates can is "
        f"{smallest:g} bits per weight; give at least that, or smaller candidates"
    )


def _below_divergence(dense: QuantizationPlan, whole: Whole) -> QuantizationPlan:
    """The smallest plan whose choices together diverge by at most `dense.limit` on the sample."""
    sizes = [[option.bytes for option in choice.options] for choice in dense.choices]
    limit = dense.limit
    for _ in range(_ATTEMPTS):
        picks = solve(sizes, _errors(dense), limit)
        assert picks is not None  # dense has no error
        found = dense.picking(picks)
        error = whole.error(found)
        if error <= dense.limit:
            return dense.picking(picks, measured=error)
        # errors do not quite add up: allow as much less as they were more
        limit *= max(0.1, min(0.9, 0.95 * dense.limit / error))
    return dense.picking([0] * len(dense.choices), measured=0.0)


def _errors(dense: QuantizationPlan) -> list[list[float]]:
    return [[option.error for option in choice.options] for choice in dense.choices]
