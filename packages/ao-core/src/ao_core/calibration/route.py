"""Whether the blocks of a model can be run one by one, each on what the one before it returned.

A chain is the children of a ModuleList or Sequential, called once each, in order. What each is called with
must be tensors that the block before it returned, as they are, and others that depend on no block. That is
proven by two runs of the code around the blocks, with stubs in their places that return random tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from ao_core.calibration.gathering import Group
from ao_core.calibration.stubs import Chain
from ao_core.calibration.trace import Trace

__all__ = ["Place", "Route", "structural"]

#: (2c + 1, k) in block k of chain c; (2s, 0) in no block, after s chains
Place = tuple[int, int]


@dataclass(frozen=True)
class Route:
    """Chains in the order in which they are called, and where each group is."""

    chains: tuple[Chain, ...]
    #: numbers of these chains in the trace
    numbers: tuple[int, ...]
    #: in the order of the data, with its place each
    groups: tuple[tuple[Place, Group], ...]
    #: what stands in the way of other chains, by their names
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        taken = [
            f"{chain}: {len(chain.blocks)} blocks, called once each in order"
            for chain in self.chains
        ]
        return "; ".join([*taken, *(f"not {reason}" for reason in self.reasons)])


class _Unfit(NamedTuple):
    """A chain that cannot be run block by block."""

    #: its number in the trace
    chain: int
    reason: str


def structural(trace: Trace) -> Route:
    """The route by what happened in a run; no chains where there are none."""
    reasons: list[str] = []
    gains: dict[int, int] = {}
    for number, chain in enumerate(trace.chains):
        blocks = _blocks_of_groups(trace, number)
        sizes = [sum(block == k for block in blocks) for k in range(len(chain.blocks))]
        # pairs of groups in different blocks, of which prefixes would be run again
        if gain := sum(sizes) ** 2 - sum(size**2 for size in sizes):
            if reason := trace.reasons.get(number) or _not_in_order(trace, number):
                reasons.append(f"{chain}: {reason}")
            else:
                gains[number] = gain
    chosen: list[int] = []
    for number in sorted(gains, key=lambda each: -gains[each]):
        if all(_apart(trace, number, other) for other in chosen):
            chosen.append(number)
    chosen.sort(key=lambda number: _span(trace, 0, number))
    while True:
        found = _placed(trace, chosen)
        if isinstance(found, Route):
            return replace(found, reasons=tuple(reasons))
        reasons.append(f"{trace.chains[found.chain]}: {found.reason}")
        chosen.remove(found.chain)


def _blocks_of_groups(trace: Trace, number: int) -> list[int]:
    """The block in which each group is first seen; -1: in none."""
    found: dict[str, int] = {}
    for events in trace.events:
        inside = -1
        for event in events:
            if event.block[0] == number:
                inside = event.block[1] if event.kind == "enter" else -1
            elif event.kind == "matmul":
                found.setdefault(event.fqn, inside)
    return [found[group.fqn] for group in trace.groups]


def _not_in_order(trace: Trace, number: int) -> str | None:
    """Why the blocks of a container are no chain; None where they are called once each, in order."""
    count = len(trace.chains[number].blocks)
    wanted = [(kind, (number, k)) for k in range(count) for kind in ("enter", "exit")]
    for events in trace.events:
        if [(e.kind, e.block) for e in events if e.block[0] == number] != wanted:
            return "its children are not called once each, in order"
    return None


def _span(trace: Trace, batch: int, number: int) -> tuple[int, int]:
    """The first and the last event of a chain in a batch."""
    places = [place for place, e in enumerate(trace.events[batch]) if e.block[0] == number]
    return places[0], places[-1]


def _apart(trace: Trace, one: int, other: int) -> bool:
    """Whether one chain ends before the other begins, the same one in all batches."""
    spans = [(_span(trace, b, one), _span(trace, b, other)) for b in range(len(trace.events))]
    return all(a[1] < b[0] for a, b in spans) or all(b[1] < a[0] for a, b in spans)


def _placed(trace: Trace, chosen: Sequence[int]) -> Route | _Unfit:
    """The places of all groups, or the chain that something is wrong with and why."""
    places: dict[str, Place] = {}
    for events in trace.events:
        place: Place = (0, 0)
        running: int | None = None
        for event in events:
            if event.block[0] in chosen:
                chain, block = chosen.index(event.block[0]), event.block[1]
                is_last = block == len(trace.chains[event.block[0]].blocks) - 1
                if event.kind == "enter":
                    place, running = (2 * chain + 1, block), None
                elif is_last:
                    place = (2 * chain + 2, 0)
                else:
                    running = event.block[0]  # between two blocks
            elif event.kind == "matmul":
                if running is not None:
                    return _Unfit(running, f"{event.fqn} is used between its blocks")
                if places.setdefault(event.fqn, place) != place:
                    culprit = max(place, places[event.fqn])[0]
                    wrong = chosen[min((culprit - 1) // 2, len(chosen) - 1)]
                    return _Unfit(wrong, f"{event.fqn} is used in more than one place")
    groups = []
    for group in trace.groups:
        where = {places[entry.fqn] for entry in group.entries}
        if len(where) > 1:
            wrong = chosen[min((max(where)[0] - 1) // 2, len(chosen) - 1)]
            return _Unfit(wrong, f"{group.fqn} has the same inputs as a weight of another place")
        groups.append((where.pop(), group))
    groups.sort(key=lambda each: each[0])  # within a place the order stays
    chains = tuple(trace.chains[number] for number in chosen)
    for place, group in groups[:-1]:
        if place[0] and (reason := _tied_elsewhere(chains, place, group)):
            return _Unfit(chosen[(place[0] - 1) // 2], reason)
    return Route(chains, tuple(chosen), tuple(groups), ())


def _tied_elsewhere(chains: Sequence[Chain], place: Place, group: Group) -> str | None:
    """What a rewritten weight would change before its place; None where there is nothing."""
    for entry in group.entries:
        if len(entry.owners) > 1:
            inside: set[nn.Module] = set()
            if place[0] % 2:
                inside = set(chains[place[0] // 2].blocks[place[1]].modules())
            if any(owner.module not in inside for owner in entry.owners):
                return f"{entry.fqn} is tied to {entry.owners[1].fqn}, which may come before it"
    return None
