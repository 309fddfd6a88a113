"""Exchanges: a group of layers in another format, where the whole model becomes faster by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from ao_core import Config
from ao_quant.autotuning.result import Exchange, Layer
from ao_quant.autotuning.whole import MIXED, Bench, Model

__all__ = ["exchanged"]

#: exchanges that are tried
_TRIES = 8
#: least share of the model's time that layers, timed separately, must promise
_PROMISE = 0.02
#: an exchange counts if the whole model takes at most this share of its time before
_GAIN = 0.99


class _Idea(NamedTuple):
    layers: tuple[Layer, ...]
    before: Config | None
    after: Config | None
    #: seconds that the layers take less, timed separately
    promise: float


def exchanged(
    start: Model, seconds: float, layers: Sequence[Layer], bench: Bench, max_loss: float
) -> tuple[Model, list[Exchange]]:
    """The model after all exchanges that pay, and what was tried.

    Layers that are called alike and have the same format are exchanged together. What they promise when timed
    separately orders the tries; the times of the whole model, before and after in interleaved rounds, decide.

    Args:
        start: the best recipe for all layers, or dense.
        seconds: of it.
        layers: each with its own times.
        bench: for times and losses.
        max_loss: of the answer.
    """
    current, tried = start, list[Exchange]()
    seen: set[tuple[str, Config | None]] = set()
    while len(tried) < _TRIES:
        ideas = [
            idea for idea in _ideas(current, layers) if (idea.layers[0].fqn, idea.after) not in seen
        ]
        best = max(ideas, key=lambda idea: idea.promise, default=None)
        if best is None or best.promise < _PROMISE * seconds:
            break
        names = tuple(layer.fqn for layer in best.layers)
        seen.add((names[0], best.after))
        other = Model(MIXED, {**current.formats, **dict.fromkeys(names, best.after)})
        loss = bench.loss(other, at_most=max_loss)
        if not isfinite(loss):
            reason = f"loses more than max_loss={max_loss:g}"
            tried.append(Exchange(names, best.before, best.after, None, None, reason))
            continue
        before, after = bench.seconds(
            [Model("before", current.formats), Model("after", other.formats)]
        )
        pays = after <= _GAIN * before
        reason = "" if pays else "the whole model is not faster with it"
        tried.append(Exchange(names, best.before, best.after, before / after, loss, reason))
        if pays:
            current = other
    return current, tried


def _ideas(current: Model, layers: Sequence[Layer]) -> Iterator[_Idea]:
    """Each group of layers in each other format that all of them can have."""
    groups: dict[tuple[object, ...], list[Layer]] = defaultdict(list)
    for layer in layers:
        formats = tuple(timing.config for timing in layer.timings if timing.seconds is not None)
        uses = repr(layer.uses)
        groups[layer.shape, uses, formats, current.formats[layer.fqn]].append(layer)
    for group in groups.values():
        before = current.formats[group[0].fqn]
        for timing in group[0].timings:
            if timing.config != before and timing.seconds is not None:
                promise = sum(
                    layer.seconds_in(before) - layer.seconds_in(timing.config) for layer in group
                )
                yield _Idea(tuple(group), before, timing.config, promise)
