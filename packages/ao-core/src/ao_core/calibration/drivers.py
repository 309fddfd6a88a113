"""The driver "blocks": inputs of each group of weights, made by the groups before it as they are by then.

Like "prefix" it is a generator: between two groups the caller puts the rewritten weights in. Both give the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.calibration.block import Block, called_with, float_leaves
from ao_core.calibration.computed import Computed
from ao_core.calibration.gathering import Group
from ao_core.calibration.inputs import observe, operands
from ao_core.calibration.observing import Note, observing
from ao_core.calibration.pooling import Pools
from ao_core.calibration.probe import Holes
from ao_core.calibration.ranks import added, ranks_of
from ao_core.calibration.route import Place, Route
from ao_core.calibration.samples import Sample, blaming
from ao_core.calibration.stepping import stepping
from ao_core.calibration.store import Kept, Store
from ao_core.calibration.stubs import Chain, Enough, flattened, stubbed
from ao_core.calibration.trace import Trace
from ao_core.calibration.turns import GroupNeed, Runs, Turn, gathered, one
from ao_core.calibration.weights import Weights
from ao_core.targets import Decision

__all__ = ["Blocks"]


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
    #: whether statistics of a group are of its inputs and of those in the model as it was
    paired: Callable[[Group], bool]
    store: Store
    weights: Weights
    pools: Pools
    #: (chain, batch) -> what its last block returned
    _ends: _Ends = field(default_factory=dict)
    #: the same in the model as it was
    _was_ends: _Ends = field(default_factory=dict)

    def visit(self) -> Generator[Turn, None, None]:
        """All groups in the order of the data, and the statistics of their inputs."""
        for chain in range(len(self.route.chains)):
            yield from self._loose(2 * chain)
            yield from self._chain(chain)
        yield from self._loose(2 * len(self.route.chains))

    def _is_needed_after(self, place: Place) -> bool:
        return any(where > place for where, _ in self.route.groups)

    def _is_wanted(self, place: Place) -> bool:
        """Whether it is asked from here on what is in the model as it was."""
        later = [(where, each) for where, each in self.route.groups if place <= where]
        own = [each for where, each in later if where < (place[0] + 1, 0)]
        # what a block returned is wanted of those that are rewritten at once
        return any(map(self.at_once, own)) or any(self.paired(each) for _, each in later)

    def _at(self, place: Place) -> list[Group]:
        return [group for where, group in self.route.groups if where == place]

    def _seen(
        self,
        groups: Sequence[Group],
        runs: Runs,
        place: Place,
        settle: Callable[[Sequence[Decision]], None] = lambda entries: None,
    ) -> Generator[Turn, None, None]:
        there = {entry.fqn for group in self._at(place) for entry in group.entries}
        ranks = ranks_of(self.batches)
        for group in groups:
            yield one(group, self.need, self.trace, runs, ranks, self.pools, there)
            settle(group.entries)

    def _seen_at_once(
        self,
        groups: Sequence[Group],
        stage: _Stage,
        held: _Stream,
        runs: Runs,
        wanted: _Stream,
        name: str,
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

        ranks = ranks_of(self.batches)
        run = partial(stage.returns_with, held, entries)
        block = Block(name, len(self.batches), run, wanted_of, partial(added, ranks=ranks))
        seen = gathered(left, self.trace, runs, ranks)
        yield seen._replace(block=block)

    def _loose(self, segment: int) -> Generator[Turn, None, None]:
        """Groups in no block: the code around the blocks is run, as far as the next chain."""

        def run(ends: _Ends, batch: int, entries: Sequence[Decision], note: Note) -> None:
            with self._around(batch, segment // 2, self._stop, ends), suppress(_Next):
                observe(self.model, self.batches[batch], entries, note, self.weights)

        def run_as_it_was(batch: int, entries: Sequence[Decision], note: Note) -> None:
            with self.weights.as_it_was():
                run(self._was_ends, batch, entries, note)

        def run_partly(batch: int, entries: Sequence[Decision], note: Note) -> None:
            with self.weights.as_it_was(entries):
                run(self._ends, batch, entries, note)

        if groups := self._at((segment, 0)):
            runs = Runs(partial(run, self._ends), run_as_it_was, run_partly)
            with self.weights.around():
                yield from self._seen(groups, runs, (segment, 0))

    @staticmethod
    def _stop(block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Next

    def _around(self, batch: int, done: int, act: Callable[..., Any], ends: _Ends) -> ExitStack:
        """A context in which the first chains return what they returned, and `act` is the next one."""
        stack = ExitStack()
        for number, chain in enumerate(self.route.chains[: done + 1]):
            if number < done:
                stack.enter_context(stubbed(chain, self._returns(batch, number, chain, ends)))
            else:
                stack.enter_context(stubbed(chain, act))
        return stack

    def _returns(self, batch: int, number: int, chain: Chain, of: _Ends) -> Callable[..., Any]:
        last = len(chain.blocks) - 1

        def act(block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outputs = self.trace.outputs(batch, self.route.numbers[number], block)
            if block < last:
                return outputs.filled(outputs.zeros())
            ends = of[number, batch]
            # copies, in case the code around the blocks changes them in place
            return outputs.filled([e if e is None else self.store.get(e).clone() for e in ends])

        return act

    def _chain(self, number: int) -> Generator[Turn, None, None]:
        if not self._is_needed_after((2 * number, 0)):
            return
        count, is_wanted = len(self.batches), self._is_wanted((2 * number + 1, 0))
        with self.weights.around():
            calls = [self._captured(number, batch, self._ends) for batch in range(count)]
            was_calls = calls
            if is_wanted and any(place < (2 * number + 1, 0) for place, _ in self.route.groups):
                with self.weights.as_it_was():
                    was_calls = [self._captured(number, b, self._was_ends) for b in range(count)]
        held: _Stream = [[] for _ in self.batches]
        # the same in the model as it was
        originals: _Stream = [[] for _ in self.batches]
        chain = self.route.chains[number]
        for k, name in enumerate(chain.names):
            if not self._is_needed_after((2 * number + 1, k - 1)):
                break
            block = chain.blocks[k]
            with self.weights.inside(block):
                stage, was = (_Stage(self, block, k, each) for each in (calls, was_calls))
                place = (2 * number + 1, k)
                held, originals = yield from self._block(place, stage, was, held, originals, name)
        for batch in range(count):
            self._ends[number, batch] = held[batch]
            self._was_ends[number, batch] = originals[batch] or held[batch]

    def _block(
        self, place: Place, stage: _Stage, was: _Stage, held: _Stream, originals: _Stream, name: str
    ) -> Generator[Turn, None, tuple[_Stream, _Stream]]:
        """The groups of a block; what it returns then, and what it returned as it was."""
        groups = self._at(place)
        together = [group for group in groups if self.at_once(group)]
        wanted: _Stream = [[] for _ in self.batches]
        if self._is_wanted(place):
            with self.weights.as_it_was():
                wanted = [self._kept(was.returns(originals, b)) for b in range(len(was.calls))]
        computed = Computed(self.store, self.trace.is_used_once)

        def run(batch: int, entries: Sequence[Decision], note: Note) -> None:
            with computed.reused(batch):
                stage.observed(held, batch, entries, note)

        runs = Runs(
            run,
            partial(was.observed_as_it_was, originals, None),
            lambda batch, entries, note: stage.observed_as_it_was(
                held, entries, batch, entries, note
            ),
        )
        if together:
            yield from self._seen_at_once(together, stage, held, runs, wanted, name)
            computed.settle([entry for group in together for entry in group.entries])
        others = [group for group in groups if group not in together]
        yield from self._seen(others, runs, place, computed.settle)
        outputs: _Stream = [[] for _ in self.batches]
        for batch in range(len(stage.calls)):
            with computed.reused(batch, last=True):
                if self._is_needed_after(place):
                    outputs[batch] = self._kept(stage.returns(held, batch))
            finished = {id(e): e for s in (stage, was) for e in s.calls[batch].finished(stage.k)}
            for each in (*held[batch], *originals[batch], *finished.values()):
                if each is not None:
                    self.store.drop(each)
        return outputs, wanted

    def _kept(self, returned: Any) -> list[Kept | None]:
        leaves = pytree.tree_leaves(returned)
        return [None if each is None else self.store.put(each) for each in leaves]

    def _captured(self, number: int, batch: int, ends: _Ends) -> _Calls:
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

        with self._around(batch, number, act, ends), suppress(_Next):
            observe(self.model, self.batches[batch], [], _nothing)
        return calls


class _Next(Enough):
    """Ends a run where a chain begins, or ends."""


def _nothing(name: str, number: int, x: Tensor) -> None:
    """A note of nothing."""


#: for each batch, what a block returned
_Stream = list[list[Kept | None]]
#: (chain, batch) -> what its last block returned
_Ends = dict[tuple[int, int], list[Kept | None]]


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

    def observed_as_it_was(
        self,
        held: _Stream,
        old: Sequence[Decision] | None,
        batch: int,
        entries: Sequence[Decision],
        note: Note,
    ) -> Any:
        """The same while some weights, or all, are those before any was rewritten."""
        with self.driver.weights.as_it_was(old):
            return self.observed(held, batch, entries, note)

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
