"""The proof that blocks can be run one by one: two runs of the code around them, with stubs for blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.calibration.inputs import observe
from ao_core.calibration.route import Route
from ao_core.calibration.samples import Sample
from ao_core.calibration.stepping import same_tensor
from ao_core.calibration.stubs import Enough, flattened, is_plain, stubbed
from ao_core.calibration.trace import Trace

__all__ = ["Hole", "Holes", "probed"]

#: the number of an output of the block before, or None for a leaf that depends on no block
Hole = int | None
#: (batch, chain of the route, block) -> for each leaf of its arguments
Holes = dict[tuple[int, int, int], tuple[Hole, ...]]

#: leaves of a block's arguments, besides tensors, that running it cannot change
_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)


class _Refused(BaseException):
    """A chain is none, and why."""

    def __init__(self, chain: int, reason: str) -> None:
        super().__init__(reason)
        self.chain, self.reason = chain, reason


@dataclass
class _Run:
    """What one run with stubs saw."""

    #: (chain, block) -> leaves of its arguments and what they are
    calls: dict[tuple[int, int], tuple[list[Any], tuple[Hole, ...]]] = field(default_factory=dict)
    #: operands of matmuls outside of the blocks, with the number of chains before them
    operands: list[tuple[int, str, Tensor]] = field(default_factory=list)
    #: tensors that depend on no block, with their versions
    constants: list[tuple[int, Tensor, int]] = field(default_factory=list)


def probed(
    model: nn.Module, batches: Sequence[Sample], trace: Trace, route: Route
) -> tuple[Holes, int, str]:
    """What each block is called with, or the chain of the route that is none after all, and why."""
    holes: Holes = {}
    try:
        for number, batch in enumerate(batches):
            first = _run(model, batch, number, trace, route, {})
            kept = {c: first.last[c] for c in first.last}
            second = _run(model, batch, number, trace, route, kept)
            _compare(first.seen, second.seen)
            for (chain, block), (_, kinds) in first.seen.calls.items():
                holes[number, chain, block] = kinds
    except _Refused as refused:
        return {}, refused.chain, refused.reason
    except Exception as error:
        reason = (
            f"the code around its blocks fails with other values: {type(error).__name__}: {error}"
        )
        return {}, len(route.chains) - 1, reason
    return holes, -1, ""


@dataclass
class _Done:
    seen: _Run
    #: chain -> what its last block returned
    last: dict[int, list[Tensor | None]]


def _run(
    model: nn.Module,
    batch: Sample,
    number: int,
    trace: Trace,
    route: Route,
    given: dict[int, list[Tensor | None]],
) -> _Done:
    """Run the code around the blocks, which return random tensors; the last of a chain what is given.

    The run ends with the last call of a block or use of a weight that the trace has: a head that is not
    quantized can cost more than a block.
    """
    seen, last = _Run(), dict[int, list[Tensor | None]]()
    generator = torch.Generator().manual_seed(1 + len(given))
    before: list[tuple[Tensor, int]] = []
    finished = 0

    def act(chain: int, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal before, finished
        leaves = flattened(args, kwargs)[0]
        if (chain, block) in seen.calls:
            raise _Refused(chain, f"block {block} is called again when others return other values")
        outputs = before if block else []
        kinds = tuple(_kind(leaf, outputs, chain, block) for leaf in leaves)
        seen.calls[chain, block] = leaves, kinds
        seen.constants += [
            (chain, leaf, leaf._version)
            for leaf, kind in zip(leaves, kinds, strict=True)
            if kind is None and isinstance(leaf, Tensor)
        ]
        described = trace.outputs(number, route.numbers[chain], block)
        is_last = block == len(route.chains[chain].blocks) - 1
        made = described.drawn(generator)
        if is_last and chain in given:
            made = [None if leaf is None else leaf.clone() for leaf in given[chain]]
        if is_last:
            # a copy, in case the code around the blocks changes it in place
            last[chain] = [None if leaf is None else leaf.clone() for leaf in made]
            finished = chain + 1
        before = [
            (leaf, leaf._version) if leaf is not None else (torch.empty(0), 0) for leaf in made
        ]
        end_if_all_seen()
        return described.filled(made)

    loose = [entry for place, g in route.groups if not place[0] % 2 for entry in g.entries]
    count = _events_around(trace, number, route, {entry.fqn for entry in loose})

    def end_if_all_seen() -> None:
        if len(seen.calls) + len(seen.operands) == count:
            raise Enough

    def note(name: str, matrix: int, x: Tensor) -> None:
        seen.operands.append((finished, name, x.clone()))
        end_if_all_seen()

    with ExitStack() as stubs, suppress(Enough):
        for place, each in enumerate(route.chains):
            stubs.enter_context(stubbed(each, partial(act, place)))
        observe(model, batch, loose, note)
    for number_of_chain, tensor, version in seen.constants:
        if tensor._version != version:
            raise _Refused(number_of_chain, "what its blocks get is changed in place between them")
    return _Done(seen, last)


def _events_around(trace: Trace, number: int, route: Route, loose: Collection[str]) -> int:
    """How often a batch calls a block of the route or uses a weight that is in no block."""
    events = trace.events[trace.run_for[number]]
    calls = sum(e.kind == "enter" and e.block[0] in route.numbers for e in events)
    return calls + sum(e.fqn in loose for e in events)


def _kind(leaf: Any, outputs: list[tuple[Tensor, int]], chain: int, block: int) -> Hole:
    """Which output of the block before a leaf is, if any."""
    if isinstance(leaf, Tensor):
        if not is_plain(leaf):
            raise _Refused(chain, f"block {block} gets a {type(leaf).__name__}")
        for place, (output, version) in enumerate(outputs):
            if same_tensor(leaf, output) and leaf._version == version:
                return place
    elif not isinstance(leaf, _VALUES):
        raise _Refused(
            chain,
            f"block {block} gets a {type(leaf).__name__}, which running it again could change (a cache is "
            "switched off by an argument of the model, such as use_cache=False)",
        )
    return None


def _compare(first: _Run, second: _Run) -> None:
    """Raise where something depends on blocks other than the one right before it."""
    if list(first.calls) != list(second.calls):
        raise _Refused(0, "which blocks are called depends on what they return")
    for (chain, block), (leaves, kinds) in first.calls.items():
        others, again = second.calls[chain, block]
        if kinds != again:
            raise _Refused(chain, f"what block {block} gets depends on what blocks return")
        for leaf, other, kind in zip(leaves, others, kinds, strict=True):
            if kind is None and not _equal(leaf, other):
                raise _Refused(
                    chain,
                    f"block {block} gets something computed from what an earlier block returned",
                )
    for (chains, name, x), (_, again_name, y) in zip(first.operands, second.operands, strict=True):
        if name != again_name or not _equal(x, y):
            raise _Refused(
                max(chains - 1, 0), f"the inputs of {name} come from more than its last block"
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
