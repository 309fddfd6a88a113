"""Two ways to see the inputs of each group of weights, made by the groups before it as they are by then.

Both are generators: between two groups the caller puts the rewritten weights in. They give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.calibration.block import Block, called_with, float_leaves
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

__all__ = ["Blocks", "Turn", "prefix"]


class Turn(NamedTuple):
    """Groups that are to be rewritten now."""

    #: each with the statistics of its inputs; empty where they are not needed
    groups: list[tuple[Group, tuple[Statistics, ...]]]
    #: the block that all of them are in, where they are rewritten at once
    block: Block | None = None


#: a group -> what is needed of its inputs; None: nothing, it is rewritten already
GroupNeed = Callable[[Group], tuple[Statistic, ...] | None]
#: (number of a batch, weights, note) runs what makes the inputs of the weights
Run = Callable[[int, Sequence[Decision], Note], object]


def _gathered(
    asked: Sequence[tuple[Group, tuple[Statistic, ...]]],
    trace: Trace,
    run: Run,
    ranks: Ranks | None,
) -> Turn:
    """The statistics of the inputs of groups over all batches, from one run over them.

    A run ends as soon as the inputs are seen, where the trace says how often that will be. In batches that
    were not traced, it is checked that the weights of a group have the same inputs there, too.
    """
    groups = [group for group, _ in asked]
    entries = [entry for group in groups for entry in group.entries]
    firsts = [group.entries[0] for group in groups]
    gathering = Gathering({group.fqn: need for group, need in asked})
    counted = all(len(group.statistics) == 1 for group in groups)
    counted = counted and all(trace.is_used_once(entry.fqn) for entry in entries)
    for number, is_traced in enumerate(trace.is_traced):
        gathering.next_batch()
        watched = firsts if is_traced else entries
        use = Gathering({each.fqn: () for each in watched})
        left = {each.fqn for each in watched} if counted else None
        with suppress(Enough):
            run(number, watched, partial(_note, gathering, use, left))
        for group in () if is_traced else groups:
            _check_use(use, group, number)
    found = {
        entry.fqn: each.statistics for each in gathering.groups(firsts) for entry in each.entries
    }
    return Turn(
        [
            (
                group,
                summed(
                    found.get(group.fqn) or tuple(Statistics(need) for _ in group.statistics), ranks
                ),
            )
            for group, need in asked
        ]
    )


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
    model: nn.Module, batches: Sequence[Sample], trace: Trace, need: GroupNeed
) -> Generator[Turn, None, None]:
    """Run the whole model for each group: right for any module, and quadratic in its depth."""

    def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
        observe(model, batches[batch], entries, note)

    for group in trace.groups:
        yield _one(group, need, trace, run, ranks_of(batches))


def _one(group: Group, need: GroupNeed, trace: Trace, run: Run, ranks: Ranks | None) -> Turn:
    """One group and what was seen of its inputs, if that is needed."""
    asked = need(group)
    return Turn([(group, ())]) if asked is None else _gathered([(group, asked)], trace, run, ranks)


@dataclass
class Blocks:
    """Run each block on what the one before it returned: linear in the number of blocks.

    The inputs of one block are held for all batches, in a `Store`; where its weights are rewritten at once,
    also what it returned as it was.
    """

    model: nn.Module
    batches: Sequence[Sample]
    trace: Trace
    route: Route
    holes: Holes
    need: GroupNeed
    #: whether a group is rewritten at once with others of its block
    at_once: Callable[[Group], bool]
    store: Store
    weights: Weights
    #: (chain, batch) -> what its last block returned
    _ends: dict[tuple[int, int], list[Kept | None]] = field(default_factory=dict)

    def visit(self) -> Generator[Turn, None, None]:
        """All groups in the order of the data, and the statistics of their inputs."""
        for chain in range(len(self.route.chains)):
            yield from self._loose(2 * chain)
            yield from self._chain(chain)
        yield from self._loose(2 * len(self.route.chains))

    def _is_needed_after(self, place: Place) -> bool:
        return any(where > place for where, _ in self.route.groups)

    def _is_wanted(self, place: Place) -> bool:
        """Whether this block, or a later one of its chain, is rewritten at once."""
        later = (each for where, each in self.route.groups if place <= where < (place[0] + 1, 0))
        return any(map(self.at_once, later))

    def _at(self, place: Place) -> list[Group]:
        return [group for where, group in self.route.groups if where == place]

    def _seen(self, groups: Sequence[Group], run: Run) -> Generator[Turn, None, None]:
        for group in groups:
            yield _one(group, self.need, self.trace, run, ranks_of(self.batches))

    def _seen_at_once(
        self, groups: Sequence[Group], stage: _Stage, held: _Stream, wanted: _Stream, name: str
    ) -> Generator[Turn, None, None]:
        """The groups of a block that a visit before has rewritten, then the others together."""
        asked = [(group, self.need(group)) for group in groups]
        yield from (Turn([(group, ())]) for group, need in asked if need is None)
        left = [(group, need) for group, need in asked if need is not None]
        if not left:
            return
        entries = [entry for group, _ in left for entry in group.entries]

        def wanted_of(batch: int) -> list[Tensor]:
            return float_leaves([e and self.store.get(e) for e in wanted[batch]])

        block = Block(
            name, len(self.batches), partial(stage.returns_with, held, entries), wanted_of
        )
        seen = _gathered(left, self.trace, partial(stage.observed, held), ranks_of(self.batches))
        yield seen._replace(block=block)

    def _loose(self, segment: int) -> Generator[Turn, None, None]:
        """Groups in no block: the code around the blocks is run, as far as the next chain."""

        def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
            with self._around(batch, segment // 2, self._stop), suppress(_Next):
                observe(self.model, self.batches[batch], entries, note, self.weights)

        if groups := self._at((segment, 0)):
            with self.weights.around():
                yield from self._seen(groups, run)

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

    def _chain(self, number: int) -> Generator[Turn, None, None]:
        if not self._is_needed_after((2 * number, 0)):
            return
        with self.weights.around():
            calls = [self._captured(number, batch) for batch in range(len(self.batches))]
        held: _Stream = [[] for _ in self.batches]
        # the same in the model as it was
        originals: _Stream = [[] for _ in self.batches]
        chain = self.route.chains[number]
        for k, name in enumerate(chain.names):
            if not self._is_needed_after((2 * number + 1, k - 1)):
                break
            block = chain.blocks[k]
            with self.weights.inside(block):
                stage = _Stage(self, block, k, calls)
                place = (2 * number + 1, k)
                held, originals = yield from self._block(place, stage, held, originals, name)
        for batch, ends in enumerate(held):
            self._ends[number, batch] = ends

    def _block(
        self, place: Place, stage: _Stage, held: _Stream, originals: _Stream, name: str
    ) -> Generator[Turn, None, tuple[_Stream, _Stream]]:
        """The groups of a block; what it returns then, and what it returned as it was."""
        groups = self._at(place)
        together = [group for group in groups if self.at_once(group)]
        wanted: _Stream = [[] for _ in self.batches]
        if self._is_wanted(place):
            wanted = [self._kept(stage.returns(originals, b)) for b in range(len(stage.calls))]
        if together:
            yield from self._seen_at_once(together, stage, held, wanted, name)
        others = [group for group in groups if group not in together]
        yield from self._seen(others, partial(stage.observed, held))
        outputs: _Stream = [[] for _ in self.batches]
        for batch, call in enumerate(stage.calls):
            if self._is_needed_after(place):
                outputs[batch] = self._kept(stage.returns(held, batch))
            for each in (*held[batch], *originals[batch], *call.finished(stage.k)):
                if each is not None:
                    self.store.drop(each)
        return outputs, wanted

    def _kept(self, returned: Any) -> list[Kept | None]:
        leaves = pytree.tree_leaves(returned)
        return [None if each is None else self.store.put(each) for each in leaves]

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


#: for each batch, what a block returned
_Stream = list[list[Kept | None]]


@dataclass(frozen=True)
class _Stage:
    """One block of a chain, run on inputs that were recorded."""

    driver: Blocks
    block: nn.Module
    k: int
    calls: Sequence[_Calls]

    def _arguments(self, held: _Stream, batch: int) -> Any:
        return self.calls[batch].arguments(self.k, held[batch], self.driver.store)

    def observed(self, held: _Stream, batch: int, entries: Sequence[Decision], note: Note) -> Any:
        """What the block returns after what `held` has, while inputs of weights are noted."""
        args, kwargs = self._arguments(held, batch)
        error = blaming(self.driver.model, self.driver.batches[batch], "data")
        with observing(operands(entries), stepping(entries, note)), error:
            return self.block(*args, **kwargs)

    def returns(self, held: _Stream, batch: int) -> Any:
        """The same, with nothing noted."""
        return self.observed(held, batch, (), _nothing)

    def returns_with(
        self,
        held: _Stream,
        entries: Sequence[Decision],
        batch: int,
        weights: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """The same with other values of some weights: the tensors of floating-point numbers."""
        args, kwargs = self._arguments(held, batch)
        with blaming(self.driver.model, self.driver.batches[batch], "data"):
            return float_leaves(called_with(self.block, entries, weights, args, kwargs))


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
