"""One visit of a model's weights in the order in which data reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor, nn

from ao_core.calibration.block import Block
from ao_core.calibration.drivers import Blocks
from ao_core.calibration.gathering import Group, Need
from ao_core.calibration.inputs import unseen_reason
from ao_core.calibration.matrices import matrix_shape
from ao_core.calibration.pooling import Pools
from ao_core.calibration.probe import probed
from ao_core.calibration.ranks import ranks_of
from ao_core.calibration.route import Route, structural
from ao_core.calibration.samples import Sample, evaluating
from ao_core.calibration.statistics import Statistic, Statistics, merged, union
from ao_core.calibration.store import storing
from ao_core.calibration.trace import Trace, traced
from ao_core.calibration.turns import Turn, once, prefix
from ao_core.calibration.weights import InMemory, Weights
from ao_core.errors import ConfigError
from ao_core.progress import Progress, watched
from ao_core.targets import Decision
from ao_core.weights import is_conv

__all__ = ["ACTIVATION_BYTES", "AtOnce", "Inputs", "Rewrite", "Visit", "inputs_of", "visit"]

#: bytes of activations that are held in memory between two blocks, unless told otherwise
ACTIVATION_BYTES = 4 << 30
#: what a visit may be driven by
_DRIVERS = ("auto", "blocks", "prefix", "once")


@dataclass(frozen=True)
class Inputs:
    """What was seen of the inputs of a weight."""

    #: of each of its matrices, see `matrices`: one, or one for each expert or group of channels
    statistics: tuple[Statistics, ...]
    #: rows that were seen, of all matrices
    rows: int
    #: what is not as it would be with more data; else empty
    note: str = ""


#: (weight, its inputs) -> its new values, of its shape, or None where it stays as it is
Rewrite = Callable[[Decision, Inputs], Tensor | None]


@dataclass(frozen=True)
class AtOnce:
    """Weights that are rewritten together with the others of their block, where the visit runs blocks."""

    #: whether a weight is one of them
    takes: Callable[[Decision], bool]
    #: (the block, its weights that data reached and their inputs) -> by name, the new values of each
    rewrite: Callable[[Block, Sequence[tuple[Decision, Inputs]]], Mapping[str, Tensor | None]]


@dataclass(frozen=True)
class Visit:
    """What a visit did."""

    #: "blocks", "prefix" or "once"
    driver: str
    #: the chains of blocks, or why there are none
    reason: str
    #: by name, the new values of weights
    values: dict[str, Tensor] = field(default_factory=dict)
    #: by name, rows that were seen
    rows: dict[str, int] = field(default_factory=dict)
    #: by name, why a weight was left out
    unseen: dict[str, str] = field(default_factory=dict)
    #: bytes of activations that were written to files
    spilled: int = 0


def visit(
    model: nn.Module,
    batches: Sequence[Sample],
    decisions: Sequence[Decision],
    need: Need,
    rewrite: Rewrite,
    *,
    done: Mapping[str, Tensor] | None = None,
    at_once: AtOnce | None = None,
    driver: str = "auto",
    activation_bytes: int = ACTIVATION_BYTES,
    progress: Progress = None,
    what: str = "visit",
    before: Callable[[Sequence[tuple[Decision, Inputs]]], None] | None = None,
    weights: Weights | None = None,
) -> Visit:
    """Rewrite weights one after the other, each by inputs that the rewritten ones before it make.

    Weights that are multiplied with the same inputs, like those of queries, keys and values, are a group and
    share statistics. The first run, of one batch of each kind, finds groups and their order. Then, for each
    group, its inputs are made by one of two drivers, with the same bits:

    - blocks: the children of a ModuleList or Sequential that are called once each, in order, run by
      themselves on what the one before returned. A block runs once for each of its groups, as far as their
      inputs, and once for its outputs, so the cost is linear in the number of blocks.
    - prefix: the whole model runs for each group. Right for any module; quadratic in its depth.

    Args:
        model: any module, which has its own weights again afterwards. It runs in evaluation mode.
        batches: what `batches_of` gave.
        decisions: the weights to visit.
        need: what is needed of the inputs of each.
        rewrite: called once for each weight that the data reached, in order; what it returns is in the
            model from then on, until the visit ends.
        done: values that an earlier visit, which was interrupted, gave to weights. They are put in without
            asking `rewrite`, so the rest becomes what it would have been.
        at_once: weights that are rewritten block by block. The first of a block's weights to be rewritten,
            while the others are as they were; what is in no block goes to `rewrite`.
        driver: "auto", blocks where that is proven to be right, else prefix; "blocks", an error where it is
            not; "prefix"; or, where nothing is rewritten, "once": blocks, so that the statistics of one block
            are held at a time, else one run of the model for all weights.
        activation_bytes: bytes of recorded inputs of blocks that are held in memory; what is above goes to
            files in a temporary folder, which is removed in any case.
        progress: True for a bar, or a function called with (done, total, name), over groups.
        what: the title of the bar.
        before: called with the weights of a group before `rewrite` is with each of them.
        weights: who brings the weights of a model that is not in memory. Then blocks are needed, and `values`
            of the result is empty.

    Raises:
        ConfigError: the model cannot be called with a batch, or `driver` cannot be used.
        QuantizationError: inputs have NaN or inf.
    """
    if driver not in _DRIVERS:
        raise ConfigError(f"driver={driver!r}: use one of {', '.join(map(repr, _DRIVERS))}")
    keeps = weights is None
    done = done or {}
    found = Visit("prefix", "")
    unseen = {entry.fqn: unseen_reason(entry) for entry in decisions}

    def needed(group: Group) -> tuple[Statistic, ...] | None:
        if all(entry.fqn in done for entry in group.entries):
            return None
        return union([need(entry) for entry in group.entries])

    def is_at_once(group: Group) -> bool:
        return at_once is not None and at_once.takes(group.entries[0])

    def is_paired(group: Group) -> bool:
        return any(each.of_pairs for entry in group.entries for each in need(entry))

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        weights = weights or InMemory(stack)
        with weights.around():
            trace = traced(model, batches, decisions, weights)
            # what is rewritten already is not a plain tensor any more, whose matmuls could be seen
            trace.groups = _split(trace.groups, lambda entry: entry.fqn in done)
            if at_once is not None:
                trace.groups = _split(trace.groups, at_once.takes)
            route, reason, seen = _routed(model, batches, trace, driver)
        weights.begin(reason, trace.activation_bytes)
        pools = Pools(model, decisions)
        if route is None:
            groups = trace.groups
            store = None
            if driver == "once":
                name, driven = driver, once(model, batches, decisions, need, pools)
            else:
                name, driven = "prefix", prefix(model, batches, trace, needed, weights, pools)
        else:
            groups = [group for _, group in route.groups]
            store = stack.enter_context(storing(activation_bytes))
            name = "blocks"
            driven = Blocks(
                model,
                batches,
                trace,
                route,
                seen,
                needed,
                is_at_once,
                is_paired,
                store,
                weights,
                pools,
            ).visit()
        stack.callback(driven.close)
        steps = iter(watched(groups, [group.fqn for group in groups], progress, what))
        next(steps, None)
        for turn in driven:
            for entry, new, rows in _rewritten(turn, rewrite, at_once, done, before):
                if rows or new is not None:
                    del unseen[entry.fqn]
                    found.rows[entry.fqn] = rows
                if new is not None:
                    weights.put(entry, new)
                    if keeps:
                        found.values[entry.fqn] = new
            for _ in turn.groups:
                next(steps, None)
        spilled = store.spilled if store else 0
    return Visit(name, reason, found.values, found.rows, unseen, spilled)


def _routed(
    model: nn.Module, batches: Sequence[Sample], trace: Trace, driver: str
) -> tuple[Route | None, str, dict[tuple[int, int, int], tuple[int | None, ...]]]:
    """The route through blocks that is proven to be right, if any, and why or why not."""
    if driver == "prefix":
        return None, "it was asked for", {}
    while True:
        route = structural(trace)
        if not route.chains:
            text = "; ".join(route.reasons) or "there are no blocks of weights in a row"
            if driver == "blocks":
                raise ConfigError(f"driver='blocks': {text}")
            return None, text, {}
        holes, wrong, reason = probed(model, batches, trace, route)
        if (ranks := ranks_of(batches)) is not None:
            found = ranks.exchange((wrong, reason))
            wrong, reason = next((each for each in found if each[0] >= 0), (-1, ""))
        if wrong < 0:
            return route, str(route), holes
        trace.reasons.setdefault(route.numbers[wrong], reason)


def _split(groups: Sequence[Group], takes: Callable[[Decision], bool]) -> list[Group]:
    """Groups of which no weight, or every one, is taken by a condition."""
    found: list[Group] = []
    for group in groups:
        parts = [[e for e in group.entries if takes(e) is kind] for kind in (True, False)]
        found += [Group(part, group.statistics) for part in parts if part]
    return found


def _rewritten(
    turn: Turn,
    rewrite: Rewrite,
    at_once: AtOnce | None,
    done: Mapping[str, Tensor],
    before: Callable[[Sequence[tuple[Decision, Inputs]]], None] | None,
) -> list[tuple[Decision, Tensor | None, int]]:
    """The weights of groups, with new values and the rows they saw."""
    found: list[tuple[Decision, Tensor | None, int]] = []
    asked: list[tuple[Decision, Inputs]] = []
    for group, statistics in turn.groups:
        for entry in group.entries:
            if entry.fqn in done:
                found.append((entry, done[entry.fqn], 0))
            else:
                asked.append((entry, inputs_of(entry, statistics, turn.pool)))
    if turn.block is not None and at_once is not None:
        reached = [(entry, inputs) for entry, inputs in asked if inputs.rows]
        new = at_once.rewrite(turn.block, reached) if reached else {}
        return [*found, *((entry, new.get(entry.fqn), inputs.rows) for entry, inputs in asked)]
    if before is not None:
        before([(entry, inputs) for entry, inputs in asked if inputs.rows])
    for entry, inputs in asked:
        found.append((entry, rewrite(entry, inputs) if inputs.rows else None, inputs.rows))
    return found


def inputs_of(
    entry: Decision, statistics: tuple[Statistics, ...], pool: Statistics | None = None
) -> Inputs:
    """The inputs of a weight: experts that saw few rows borrow from the inputs of all experts.

    Few are less than the expert has columns: Σ x xᵀ of so few rows is singular. What is missing is
    borrowed: H + τ · H_all / T_all with τ the number of missing rows. `pool` has what all experts saw where
    each is a module of its own.
    """
    rows = sum(each.rows for each in statistics)
    if pool is not None:
        (own,) = statistics
        missing = matrix_shape(tuple(entry.tensor.shape), entry.owners[0])[2] - rows
        note = (
            f"this expert saw {rows} rows, fewer than its {rows + missing} columns: the statistics of the "
            f"{pool.rows} rows of all experts stand for what is missing"
        )
        return Inputs((own.merge(pool.times(missing / pool.rows)),), rows, note)
    if len(statistics) == 1 or is_conv(entry.tensor, entry.owners[0]):
        return Inputs(statistics, rows)
    columns = entry.tensor.shape[-1]
    few = [each.rows < columns for each in statistics]
    if not any(few) or not rows:
        return Inputs(statistics, rows)
    everything = merged(statistics)
    shared = tuple(
        each.merge(everything.times((columns - each.rows) / everything.rows)) if is_few else each
        for each, is_few in zip(statistics, few, strict=True)
    )
    note = (
        f"{sum(few)} of {len(few)} experts saw fewer rows than they have columns, {columns}: "
        f"the statistics of the {rows} rows of all experts stand for what is missing"
    )
    return Inputs(shared, rows, note)
