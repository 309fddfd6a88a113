"""The error of pruning each layer at several sparsities, and the sparsity that each should get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import fsum

import torch
from torch import Tensor, nn

from ao_core import Config, FqnToConfig
from ao_core.ext import ConfigError, checked_but
from ao_core.ext.calibration import Data, Sample, answer, batches_of, evaluating, replaced
from ao_core.ext.numerics import error_sums, lower_hull
from ao_core.ext.quantizing import Decision, FilterFn, Progress, watched
from ao_core.ext.reports import aligned
from ao_sparsity.prune.choosing import chosen
from ao_sparsity.prune.magnitude import prune_magnitude
from ao_sparsity.prune.patterns import Pattern, checked_share
from ao_sparsity.prune.result import Pruning

__all__ = ["Curve", "Sensitivity", "sensitivity"]

#: (model, batch) -> a scalar, as in training
Loss = Callable[[nn.Module, Sample], Tensor]
#: pattern -> masks for the model
Method = Callable[[Config], Pruning]


@dataclass(frozen=True)
class Curve:
    """The error of pruning one parameter alone."""

    fqn: str
    weights: int
    #: the levels, from 0 on: shares of its units
    sparsities: tuple[float, ...]
    #: the error at each, 0 at the first
    errors: tuple[float, ...]

    def hull(self) -> list[int]:
        """The levels on the lower convex hull: what lies above is worse than a mixture of two others."""
        return lower_hull(self.sparsities, self.errors)

    def slope(self, i: int, j: int) -> float:
        """Added error per removed weight, from one level to another."""
        more = self.weights * (self.sparsities[j] - self.sparsities[i])
        return (self.errors[j] - self.errors[i]) / more


@dataclass(frozen=True)
class Sensitivity:
    """One curve per parameter that can be pruned; `str()` is a table."""

    #: the pattern whose sparsity was varied
    pattern: Pattern
    #: the error of each parameter by its sparsity
    curves: tuple[Curve, ...]

    def allocate(self, sparsity: float) -> FqnToConfig:
        """The sparsity of each parameter with the least sum of errors for a total budget.

        Errors are assumed to add up, and to be linear between levels. The sum is then least if steps along
        the lower convex hulls are taken in the order of their slopes, the last one in part.

        Args:
            sparsity: share of all weights that have a curve.

        Raises:
            ConfigError: the levels measured do not reach so far.
        """
        total = sum(curve.weights for curve in self.curves)
        left = checked_share(sparsity) * total
        most = sum(curve.weights * curve.sparsities[-1] for curve in self.curves)
        if left > most * (1 + 1e-9):  # sums of the same numbers may differ in their last digits
            raise ConfigError(
                f"sparsity={sparsity!r}: the levels that were measured reach {most / max(total, 1):.4g}; "
                "measure higher ones"
            )
        steps = sorted(
            (curve.slope(i, j), index, curve.weights * (curve.sparsities[j] - curve.sparsities[i]))
            for index, curve in enumerate(self.curves)
            for i, j in pairwise(curve.hull())
        )
        gone = [0.0] * len(self.curves)
        for _, index, more in steps:
            taken = min(more, left)
            gone[index] += taken
            left -= taken
        found: dict[str, Config | None] = {
            curve.fqn: self.pattern.at(min(each / curve.weights, curve.sparsities[-1]))
            for curve, each in zip(self.curves, gone, strict=True)
        }
        return FqnToConfig({**found, "*": None})

    def __str__(self) -> str:
        rows = [
            (
                curve.fqn,
                f"{curve.weights:,}",
                "  ".join(
                    f"{sparsity:.3g}: {error:.3g}"
                    for sparsity, error in zip(curve.sparsities[1:], curve.errors[1:], strict=True)
                ),
            )
            for curve in self.curves
        ]
        return aligned([("parameter", "weights", "error at each sparsity"), *rows], right=(1,))


@checked_but("data")
def sensitivity(
    model: nn.Module,
    data: Data,
    pattern: Pattern,
    filter_fn: FilterFn | None = None,
    *,
    levels: Sequence[float] = (0.25, 0.5, 0.75, 0.9),
    loss: Loss | None = None,
    method: Method | None = None,
    progress: Progress = None,
) -> Sensitivity:
    """Prune each parameter alone at several sparsities, and measure the error of the whole model.

    The model runs on the data once per parameter and level, in evaluation mode.

    Args:
        model: any module; it is unchanged afterwards. The same parameters as for `quantize_` are pruned.
        data: batches: a tensor, a tuple of arguments or a mapping of them each; a few are enough.
        pattern: what is pruned; its own sparsity does not matter.
        filter_fn: (module, its name) -> whether its weights are pruned, in place of the default.
        levels: sparsities, ascending. A parameter whose units do not allow a level uses the nearest one.
        loss: (model, batch) -> the loss, whose rise is the error; by default the error is that of the
            model's answer, the sum of its squares over that of the answer's.
        method: pattern -> masks; by default `prune_magnitude` of the model.
        progress: True for a bar, or a function called with (done, total, name).

    Raises:
        ConfigError: there is no data, or the levels do not ascend.
        QuantizationError: weights or the model's answers have NaN or inf, or weights are quantized.
    """
    batches = batches_of(data, "sensitivity")
    if not levels or any(a >= b for a, b in pairwise((0.0, *levels))):
        raise ConfigError(f"levels={tuple(levels)}: need ascending sparsities above 0")
    method = method or partial(prune_magnitude, model, filter_fn=filter_fn)
    # groups of few weights have the same pattern at several levels
    patterns = list(dict.fromkeys(pattern.at(level) for level in levels))
    found = {each.sparsity: method(each) for each in patterns if each.sparsity}
    prunable = set[str]().union(*(each.masks for each in found.values()))
    decisions = [entry for entry in chosen(model, pattern, filter_fn) if entry.fqn in prunable]
    error = _answers(model, batches) if loss is None else _losses(model, batches, loss)
    curves = []
    for entry in watched(decisions, [entry.fqn for entry in decisions], progress, "sensitivity"):
        errors = [0.0]
        for each in found.values():
            with replaced([(entry.owners, _pruned(entry, each))]):
                errors.append(error())
        curves.append(Curve(entry.fqn, entry.tensor.numel(), (0.0, *found), tuple(errors)))
    return Sensitivity(pattern, tuple(curves))


def _pruned(entry: Decision, found: Pruning) -> Tensor:
    """The parameter as a method would have it."""
    values = found.weights.get(entry.fqn, entry.tensor.detach())
    return values.masked_fill(~found.masks[entry.fqn], 0)


def _answers(model: nn.Module, batches: Sequence[Sample]) -> Callable[[], float]:
    """What gives the noise over the signal of the model's answers, beside those that it gives now."""
    right = [answer(model, batch, name="data") for batch in batches]

    def error() -> float:
        # with no replacement of its own, `answer` refuses NaN
        sums = sum(error_sums(a, answer(model, b)) for a, b in zip(right, batches, strict=True))
        signal, noise = torch.as_tensor(sums).tolist()
        return float(noise / signal) if signal else float(noise)

    return error


def _losses(model: nn.Module, batches: Sequence[Sample], loss: Loss) -> Callable[[], float]:
    """What gives the rise of the mean loss, beside that which the model has now."""

    def mean() -> float:
        with evaluating(model):
            return fsum(float(loss(model, batch)) for batch in batches) / len(batches)

    before = mean()
    return lambda: mean() - before
