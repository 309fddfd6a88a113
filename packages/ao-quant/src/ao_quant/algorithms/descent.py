"""Signed gradient descent of roundings: the steps, and which of them is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ao_quant.algorithms.rounding import Problem, Rounded, Rounding, rounded, signs, stepped

__all__ = ["Found", "descend"]

#: how often the loss over all data is measured, besides before the first step
_MEASURED = 4

#: (number of the step, the values of all weights) -> the gradient of a loss by each of them
Gradients = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Found:
    """The best roundings that were measured."""

    #: of each weight
    best: list[Rounded]
    #: over all data, at the start and of the best
    before: float
    after: float
    #: after how many steps they were found
    steps: int


def descend(
    problems: Sequence[Problem],
    gradients: Gradients,
    loss: Callable[[Sequence[Tensor]], float],
    iterations: int,
    rate: float,
    momentum: float = 0.0,
) -> Found:
    """Learn the roundings of weights together: steps of `rate`, falling linearly to 0, by signs of gradients.

    Args:
        problems: the weights.
        gradients: of the loss on some of the data.
        loss: over all data; the least of those that are measured is kept, so it is not above the first.
        iterations: the number of steps.
        rate: the size of the first step.
        momentum: the share of earlier gradients in the mean whose signs are followed. What changes its sign
            from step to step, as the part that all inputs have in common does, is averaged out.
    """
    state = [Rounding.nearest(problem) for problem in problems]
    now = [rounded(problem, by) for problem, by in zip(problems, state, strict=True)]
    first = least = loss([each.values for each in now])
    best, best_step = now, 0
    measured = {-(-iterations * part // _MEASURED) for part in range(1, _MEASURED + 1)}
    means: list[Tensor] = []
    for step in range(iterations):
        found = gradients(step, [each.values for each in now])
        if momentum and means:
            found = [b.lerp_(a, 1 - momentum) for a, b in zip(found, means, strict=True)]
        means = list(found) if momentum else []
        size = rate * (1 - step / iterations)
        state = [
            stepped(by, signs(problem, each, gradient), size)
            for problem, by, each, gradient in zip(problems, state, now, found, strict=True)
        ]
        now = [rounded(problem, by) for problem, by in zip(problems, state, strict=True)]
        if step + 1 in measured:
            error = loss([each.values for each in now])
            if error < least:
                best, least, best_step = now, error, step + 1
    return Found(best, first, least, best_step)
