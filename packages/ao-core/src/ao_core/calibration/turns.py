"""What is seen of the inputs of groups of weights that are to be rewritten now, and the driver "prefix"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from ao_core.calibration.block import Block
from ao_core.calibration.gathering import Gathering, Group, Need, collect
from ao_core.calibration.inputs import observe
from ao_core.calibration.observing import Note
from ao_core.calibration.pooling import Pools
from ao_core.calibration.ranks import Ranks, ranks_of, summed
from ao_core.calibration.samples import Sample
from ao_core.calibration.statistics import Statistic, Statistics
from ao_core.calibration.stubs import Enough
from ao_core.calibration.trace import Trace
from ao_core.calibration.weights import Weights
from ao_core.errors import QuantizationError
from ao_core.targets import Decision

__all__ = ["GroupNeed", "Runs", "Turn", "gathered", "once", "one", "prefix"]


class Turn(NamedTuple):
    """Groups that are to be rewritten now."""

    #: each with the statistics of its inputs; empty where they are not needed
    groups: list[tuple[Group, tuple[Statistics, ...]]]
    #: the block that all of them are in, where they are rewritten at once
    block: Block | None = None
    #: of all experts that the weights are of one of, where it saw few rows
    pool: Statistics | None = None


#: a group -> what is needed of its inputs; None: nothing, it is rewritten already
GroupNeed = Callable[[Group], tuple[Statistic, ...] | None]
#: (number of a batch, weights, note) runs what makes the inputs of the weights
Run = Callable[[int, Sequence[Decision], Note], object]


class Runs(NamedTuple):
    """What makes the inputs of weights."""

    #: by the weights as they are by now
    now: Run
    #: by those before any was rewritten
    was: Run
    #: by the weights as they are by now, but for those that are asked for, which are as they were
    partly: Run


def gathered(
    asked: Sequence[tuple[Group, tuple[Statistic, ...]]],
    trace: Trace,
    runs: Runs,
    ranks: Ranks | None,
) -> Turn:
    """The statistics of the inputs of groups over all batches, from one run over them.

    A run ends as soon as the inputs are seen, where the trace says how often that will be. In batches that
    were not traced, it is checked that the weights of a group have the same inputs there, too. Statistics of
    pairs take another run, of the model as it was.
    """
    groups = [group for group, _ in asked]
    entries = [entry for group in groups for entry in group.entries]
    firsts = [group.entries[0] for group in groups]
    pairs = [group.entries[0] for group, need in asked if any(each.of_pairs for each in need)]
    gathering = Gathering({group.fqn: need for group, need in asked})
    counted = all(len(group.statistics) == 1 for group in groups)
    counted = counted and all(trace.is_used_once(entry.fqn) for entry in entries)
    for number, is_traced in enumerate(trace.is_traced):
        gathering.next_batch(_was(runs, number, pairs, counted) if pairs else None)
        watched = firsts if is_traced else entries
        use = Gathering({each.fqn: () for each in watched})
        left = {each.fqn for each in watched} if counted else None
        with suppress(Enough):
            runs.now(number, watched, partial(_note, gathering, use, left))
        for group in () if is_traced else groups:
            _check_use(use, group, number)
    found = {
        entry.fqn: each.statistics for each in gathering.groups(firsts) for entry in each.entries
    }
    seen = [
        summed(found.get(group.fqn) or tuple(Statistics(need) for _ in group.statistics), ranks)
        for group, need in asked
    ]
    return Turn([(group, each) for (group, _), each in zip(asked, seen, strict=True)])


def _note(
    gathering: Gathering, use: Gathering, left: set[str] | None, name: str, matrix: int, x: Tensor
) -> None:
    """Take note of inputs; ends the run when no weight is left, where it is known which will come."""
    if name in gathering.needs:
        gathering.note(name, matrix, x)
    use.note(name, matrix, x)
    if left is not None:
        left.discard(name)
        if not left:
            raise Enough


def _was(
    runs: Runs, number: int, entries: Sequence[Decision], counted: bool
) -> dict[tuple[str, int], list[Tensor]]:
    """The inputs that a batch made in the model as it was."""
    found: dict[tuple[str, int], list[Tensor]] = {}
    left = {entry.fqn for entry in entries} if counted else None

    def note(name: str, matrix: int, x: Tensor) -> None:
        found.setdefault((name, matrix), []).append(x.detach().clone())
        if left is not None:
            left.discard(name)
            if not left:
                raise Enough

    with suppress(Enough):
        runs.was(number, entries, note)
    return found


def _check_use(use: Gathering, group: Group, batch: int) -> None:
    """Raise `QuantizationError` where weights of a group have different inputs in a batch."""
    if len(use.groups(group.entries, missing=True)) > 1:
        names = ", ".join(each.fqn for each in group.entries)
        raise QuantizationError(
            f"{names} have the same inputs in other batches, and not in data[{batch}], which has tensors of "
            "the same shapes: the model decides by values what it multiplies; calibrate with batches of "
            "different shapes, or leave these weights out"
        )


def prefix(
    model: nn.Module,
    batches: Sequence[Sample],
    trace: Trace,
    need: GroupNeed,
    weights: Weights,
    pools: Pools,
) -> Generator[Turn, None, None]:
    """Run the whole model for each group: right for any module, and quadratic in its depth."""

    def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
        observe(model, batches[batch], entries, note)

    def run_as_it_was(batch: int, entries: Sequence[Decision], note: Note) -> None:
        with weights.as_it_was():
            run(batch, entries, note)

    def run_partly(batch: int, entries: Sequence[Decision], note: Note) -> None:
        with weights.as_it_was(entries):
            run(batch, entries, note)

    runs = Runs(run, run_as_it_was, run_partly)
    names = {entry.fqn for group in trace.groups for entry in group.entries}
    for group in trace.groups:
        yield one(group, need, trace, runs, ranks_of(batches), pools, names)


def once(
    model: nn.Module,
    batches: Sequence[Sample],
    entries: Sequence[Decision],
    need: Need,
    pools: Pools,
) -> Generator[Turn, None, None]:
    """Run the whole model once for all weights, none of which is rewritten; all statistics are held."""
    names = {entry.fqn for entry in entries}

    def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
        observe(model, batches[batch], entries, note)

    for group in collect(model, batches, entries, need):
        pool = pools.of(group, group.statistics, names, len(batches), run, ranks_of(batches))
        yield Turn([(group, group.statistics)], pool=pool)


def one(
    group: Group,
    need: GroupNeed,
    trace: Trace,
    runs: Runs,
    ranks: Ranks | None,
    pools: Pools,
    there: Collection[str],
) -> Turn:
    """One group and what was seen of its inputs, if that is needed.

    `there` has the names of the weights that `runs` can observe.
    """
    asked = need(group)
    if asked is None:
        return Turn([(group, ())])
    turn = gathered([(group, asked)], trace, runs, ranks)
    seen, batches = turn.groups[0][1], len(trace.run_for)
    return turn._replace(pool=pools.of(group, seen, there, batches, runs.partly, ranks))
