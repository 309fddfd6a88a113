"""Two ways to see the inputs of each group of weights, made by the groups before it as they are by then.

Both are generators: between two groups the caller puts the rewritten weights in. They give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.calibration.gathering import Gathering, Group
from ao_core.calibration.inputs import observe, operands
from ao_core.calibration.observing import Note, observing
from ao_core.calibration.probe import Holes
from ao_core.calibration.ranks import Ranks, ranks_of, summed
from ao_core.calibration.route import Place, Route
from ao_core.calibration.samples import Sample, blaming
from ao_core.calibration.statistics import Statistic, Statistics
from ao_core.calibration.stepping import stepping
from ao_core.calibration.store import Kept, Store
from ao_core.calibration.stubs import Chain, Enough, flattened, stubbed
from ao_core.calibration.trace import Trace
from ao_core.calibration.weights import Weights
from ao_core.errors import QuantizationError
from ao_core.targets import Decision

__all__ = ["Blocks", "Seen", "prefix"]

#: a group, and the statistics of its inputs; empty where they are not needed
Seen = tuple[Group, tuple[Statistics, ...]]
#: a group -> what is needed of its inputs; None: nothing, it is rewritten already
GroupNeed = Callable[[Group], tuple[Statistic, ...] | None]
#: (number of a batch, weights, note) runs what makes the inputs of the weights
Run = Callable[[int, Sequence[Decision], Note], object]


def _gathered(
    group: Group, need: tuple[Statistic, ...], trace: Trace, run: Run, ranks: Ranks | None
) -> Seen:
    """The statistics of a group's inputs over all batches.

    A run ends as soon as the inputs are seen, where the trace says how often that will be. In batches that
    were not traced, it is checked that the weights have the same inputs there, too.
    """
    entry = group.entries[0]
    gathering = Gathering({entry.fqn: need})
    counted = len(group.statistics) == 1 and all(trace.is_used_once(e.fqn) for e in group.entries)
    for number, is_traced in enumerate(trace.is_traced):
        gathering.next_batch()
        watched = [entry] if is_traced else group.entries
        use = Gathering({each.fqn: () for each in watched})
        left = {each.fqn for each in watched}
        with suppress(Enough):
            run(number, watched, partial(_note, gathering, use, left if counted else None))
        if len(use.groups(watched, missing=True)) > 1:
            names = ", ".join(each.fqn for each in group.entries)
            raise QuantizationError(
                f"{names} have the same inputs in other batches, and not in data[{number}], which has "
                "tensors of the same shapes: the model decides by values what it multiplies; calibrate with "
                "batches of different shapes, or leave these weights out"
            )
    found = gathering.groups([entry])
    nothing = tuple(Statistics(need) for _ in group.statistics)
    return group, summed(found[0].statistics if found else nothing, ranks)


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


def prefix(
    model: nn.Module,
    batches: Sequence[Sample],
    trace: Trace,
    need: GroupNeed,
) -> Generator[Seen, None, None]:
    """Run the whole model for each group: right for any module, and quadratic in its depth."""

    def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
        observe(model, batches[batch], entries, note)

    yield from _each(trace.groups, trace, run, need, ranks_of(batches))


def _each(
    groups: Sequence[Group], trace: Trace, run: Run, need: GroupNeed, ranks: Ranks | None
) -> Generator[Seen, None, None]:
    for group in groups:
        asked = need(group)
        yield (group, ()) if asked is None else _gathered(group, asked, trace, run, ranks)


@dataclass
class Blocks:
    """Run each block on what the one before it returned: linear in the number of blocks.

    The inputs of one block are held for all batches, in a `Store`.
    """

    model: nn.Module
    batches: Sequence[Sample]
    trace: Trace
    route: Route
    holes: Holes
    need: GroupNeed
    store: Store
    weights: Weights
    #: (chain, batch) -> what its last block returned
    _ends: dict[tuple[int, int], list[Kept | None]] = field(default_factory=dict)

    def visit(self) -> Generator[Seen, None, None]:
        """All groups in the order of the data, and the statistics of their inputs."""
        for chain in range(len(self.route.chains)):
            yield from self._loose(2 * chain)
            yield from self._chain(chain)
        yield from self._loose(2 * len(self.route.chains))

    def _is_needed_after(self, place: Place) -> bool:
        return any(where > place for where, _ in self.route.groups)

    def _seen(self, place: Place, run: Run) -> Generator[Seen, None, None]:
        groups = [group for where, group in self.route.groups if where == place]
        return _each(groups, self.trace, run, self.need, ranks_of(self.batches))

    def _loose(self, segment: int) -> Generator[Seen, None, None]:
        """Groups in no block: the code around the blocks is run, as far as the next chain."""

        def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
            with self._around(batch, segment // 2, self._stop), suppress(_Next):
                observe(self.model, self.batches[batch], entries, note, self.weights)

        if any(where == (segment, 0) for where, _ in self.route.groups):
            with self.weights.around():
                yield from self._seen((segment, 0), run)

    @staticmethod
    def _stop(block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Next

    def _around(self, batch: int, done: int, act: Callable[..., Any]) -> ExitStack:
        """A context in which the first chains return what they returned, and `act` is the next one."""
        stack = ExitStack()
        for number, chain in enumerate(self.route.chains[: done + 1]):
            if number < done:
                stack.enter_context(stubbed(chain, self._returns(batch, number, chain)))
            else:
                stack.enter_context(stubbed(chain, act))
        return stack

    def _returns(self, batch: int, number: int, chain: Chain) -> Callable[..., Any]:
        last = len(chain.blocks) - 1

        def act(block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outputs = self.trace.outputs(batch, self.route.numbers[number], block)
            if block < last:
                return outputs.filled(outputs.zeros())
            ends = self._ends[number, batch]
            # copies, in case the code around the blocks changes them in place
            return outputs.filled([e if e is None else self.store.get(e).clone() for e in ends])

        return act

    def _chain(self, number: int) -> Generator[Seen, None, None]:
        if not self._is_needed_after((2 * number, 0)):
            return
        with self.weights.around():
            calls = [self._captured(number, batch) for batch in range(len(self.batches))]
        held: list[list[Kept | None]] = [[] for _ in self.batches]
        for k, block in enumerate(self.route.chains[number].blocks):
            if not self._is_needed_after((2 * number + 1, k - 1)):
                break
            with self.weights.inside(block):
                yield from self._block(number, k, block, calls, held)
        for batch, outputs in enumerate(held):
            self._ends[number, batch] = outputs

    def _block(
        self,
        number: int,
        k: int,
        block: nn.Module,
        calls: Sequence[_Calls],
        held: list[list[Kept | None]],
    ) -> Generator[Seen, None, None]:
        """The groups of a block; then `held` has what it returns in place of what it got."""
        place = (2 * number + 1, k)

        def run(batch: int, entries: Sequence[Decision], note: Note) -> Any:
            args, kwargs = calls[batch].arguments(k, held[batch], self.store)
            error = blaming(self.model, self.batches[batch], "data")
            with observing(operands(entries), stepping(entries, note)), error:
                return block(*args, **kwargs)

        yield from self._seen(place, run)
        for batch, before in enumerate(held):
            if self._is_needed_after(place):
                leaves = pytree.tree_leaves(run(batch, [], _nothing))
                held[batch] = [None if each is None else self.store.put(each) for each in leaves]
            for each in (*before, *calls[batch].finished(k)):
                if each is not None:
                    self.store.drop(each)

    def _captured(self, number: int, batch: int) -> _Calls:
        """What the blocks of a chain are called with, but for what blocks return."""
        calls = _Calls()
        kept: dict[int, tuple[Tensor, Kept]] = {}
        last = len(self.route.chains[number].blocks) - 1

        def act(block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            leaves, structure = flattened(args, kwargs)
            found: list[Any] = []
            for leaf, hole in zip(leaves, self.holes[batch, number, block], strict=True):
                if hole is not None:
                    found.append(_Returned(hole))
                elif isinstance(leaf, Tensor):
                    if id(leaf) not in kept:
                        kept[id(leaf)] = leaf, self.store.put(leaf.detach())
                    found.append(kept[id(leaf)][1])
                else:
                    found.append(leaf)
            calls.blocks.append((found, structure))
            if block == last:
                raise _Next
            outputs = self.trace.outputs(batch, self.route.numbers[number], block)
            return outputs.filled(outputs.zeros())

        with self._around(batch, number, act), suppress(_Next):
            observe(self.model, self.batches[batch], [], _nothing)
        return calls


class _Next(Enough):
    """Ends a run where a chain begins, or ends."""


def _nothing(name: str, number: int, x: Tensor) -> None:
    """A note of nothing."""


@dataclass(frozen=True)
class _Returned:
    """An argument that is what the block before returned."""

    number: int


@dataclass
class _Calls:
    """The arguments of each block of a chain in one batch."""

    blocks: list[tuple[list[Any], Any]] = field(default_factory=list)

    def arguments(self, block: int, held: Sequence[Kept | None], store: Store) -> Any:
        """Those of one block; a tensor that is there twice is one tensor."""
        leaves, structure = self.blocks[block]
        loaded: dict[int, Tensor] = {}

        def value(leaf: Any) -> Any:
            kept = held[leaf.number] if isinstance(leaf, _Returned) else leaf
            if not isinstance(kept, Kept):
                return kept
            if id(kept) not in loaded:
                loaded[id(kept)] = store.get(kept)
            return loaded[id(kept)]

        return pytree.tree_unflatten([value(leaf) for leaf in leaves], structure)

    def finished(self, block: int) -> list[Kept]:
        """What no later block needs of the arguments of this one."""
        own, later = (
            {id(leaf): leaf for leaves, _ in part for leaf in leaves if isinstance(leaf, Kept)}
            for part in (self.blocks[block : block + 1], self.blocks[block + 1 :])
        )
        return [kept for key, kept in own.items() if key not in later]
