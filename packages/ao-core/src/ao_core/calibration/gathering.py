"""Statistics of the inputs of many weights from one run: weights of the same inputs share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ao_core.calibration.inputs import finite, observe
from ao_core.calibration.matrices import matrix_shape
from ao_core.calibration.ranks import Ranks, merged_orders, ranks_of, summed
from ao_core.calibration.samples import Sample
from ao_core.calibration.statistics import Statistic, Statistics
from ao_core.calibration.stepping import same_tensor
from ao_core.progress import Progress, watched
from ao_core.targets import Decision

__all__ = ["Gathering", "Group", "Need", "collect", "over_all"]

#: a weight -> the statistics that are needed of its inputs
Need = Callable[[Decision], Sequence[Statistic]]


@dataclass
class Group:
    """Weights that are multiplied with the same inputs, like those of queries, keys and values."""

    #: the weights, in the order of the model
    entries: list[Decision]
    #: of the inputs of each matrix of a weight: one, or one for each expert or group of channels
    statistics: tuple[Statistics, ...]

    @property
    def fqn(self) -> str:
        """The name of the first."""
        return self.entries[0].fqn


@dataclass(eq=False)
class _Node:
    """Inputs that a matrix has seen, in order; matrices that saw the same ones have the same node."""

    statistics: Statistics
    #: matrices that have seen exactly this
    users: int = 0


@dataclass
class Gathering:
    """Takes notes of inputs (`observing` calls `note`) for weights that need statistics of them."""

    #: by the name of the weight, what is needed of its inputs
    needs: dict[str, tuple[Statistic, ...]]
    _roots: dict[tuple[Statistic, ...], _Node] = field(default_factory=dict)
    #: weight -> number of a matrix -> what it has seen
    _nodes: dict[str, dict[int, _Node]] = field(default_factory=dict)
    #: the input that came last, held so that no other tensor gets its memory
    _last: list[Tensor] = field(default_factory=list)
    #: node -> the node with the last input added; with the first node, whose identity is the key
    _steps: dict[int, tuple[_Node, _Node]] = field(default_factory=dict)
    #: weight -> the one after it, in the order of the data; "" comes before the first
    _after: dict[str, str | None] = field(default_factory=lambda: {"": None})
    #: the weight that this batch was the last to reach for the first time, and all that it has reached
    _place: str = ""
    _reached: set[str] = field(default_factory=set)
    #: the number of this batch
    _batch: int = -1
    #: (weight, number of a matrix) -> what its inputs in this batch were in the model as it was, in order;
    #: None: they are what they were
    _was: dict[tuple[str, int], list[Tensor]] | None = None

    def next_batch(self, was: dict[tuple[str, int], list[Tensor]] | None = None) -> None:
        """What comes next belongs to another batch, and was `was` before any weight was rewritten."""
        self._batch += 1
        self._was = was
        self._place = ""
        self._reached.clear()
        self._last.clear()
        self._steps.clear()

    def note(self, name: str, number: int, x: Tensor) -> None:
        """Add activations of one matrix."""
        if not (self._last and same_tensor(self._last[0], x)):
            self._last[:] = [x]
            self._steps.clear()
        need = self.needs[name]
        nodes = self._nodes.setdefault(name, {})
        before = nodes.get(number) or self._roots.setdefault(need, _Node(Statistics(need)))
        if id(before) not in self._steps:
            rows, seen = finite(name, x, self._batch) if need else x, before.statistics
            is_shared = before.users != 1 or any(before is new for _, new in self._steps.values())
            # where others have seen the same so far, they may not see this
            was = self._partner(name, number, rows)
            new = seen.finish().add(rows, was) if is_shared else seen.absorb(rows, was)
            self._steps[id(before)] = before, _Node(new)
        nodes[number] = self._steps[id(before)][1]
        before.users -= 1
        nodes[number].users += 1
        if name not in self._after:
            self._after[name], self._after[self._place] = self._after[self._place], name
        if (
            name not in self._reached
        ):  # what follows its second use does not come right after its first
            self._reached.add(name)
            self._place = name

    def _partner(self, name: str, number: int, x: Tensor) -> Tensor | None:
        """What activations were in the model as it was; None where they were others."""
        if self._was is None:
            return x
        waiting = self._was.get((name, number))
        if not waiting:
            return None
        was = waiting.pop(0)
        return was if was.shape == x.shape else None

    def order(self) -> list[str]:
        """The weights in the order in which batches reached them first.

        One that other batches did not reach comes right after that which precedes it in its own.
        """
        names, name = [], self._after[""]
        while name is not None:
            names.append(name)
            name = self._after[name]
        return names

    def groups(self, entries: Sequence[Decision], *, missing: bool = False) -> list[Group]:
        """Weights that the data reached, in the order in which it did, by what they saw.

        With `missing`, those that it did not reach follow.
        """
        by_name = {entry.fqn: entry for entry in entries}
        found: dict[tuple[int, ...], Group] = {}
        names = [name for name in self.order() if name in by_name]
        if missing:
            names += [name for name in by_name if name not in self._nodes]
        for name in names:
            entry, nodes = by_name[name], self._nodes.get(name, {})
            count = matrix_shape(tuple(entry.tensor.shape), entry.owners[0])[0]
            seen = [nodes.get(number) for number in range(count)]
            key = tuple(0 if node is None else id(node) for node in seen)
            if key not in found:
                nothing = Statistics(self.needs[name])
                statistics = tuple(
                    nothing if node is None else node.statistics.finish() for node in seen
                )
                found[key] = Group([], statistics)
            found[key].entries.append(entry)
        return list(found.values())


def collect(
    model: nn.Module,
    batches: Sequence[Sample],
    entries: Sequence[Decision],
    need: Need,
    progress: Progress = None,
) -> list[Group]:
    """Statistics of the inputs that the weights have in the model as it is, from one run over the data.

    Args:
        model: any module; it is run in evaluation mode and not changed.
        batches: what `batches_of` gave.
        entries: the weights; those that the data does not reach are in no group.
        need: what is needed of the inputs of each.
        progress: as for `quantize_`, over the batches.

    Raises:
        QuantizationError: inputs have NaN or inf.
        ConfigError: the model cannot be called with a batch.
    """
    gathering, ranks = (
        Gathering({entry.fqn: tuple(need(entry)) for entry in entries}),
        ranks_of(batches),
    )

    names = [f"batch {number}" for number in range(1, len(batches) + 1)]
    for batch in watched(batches, names, progress, "observe"):
        gathering.next_batch()
        observe(model, batch, entries, gathering.note)
    groups = over_all(gathering.groups(entries), entries, ranks)
    return [Group(group.entries, summed(group.statistics, ranks)) for group in groups]


def over_all(groups: list[Group], entries: Sequence[Decision], ranks: Ranks | None) -> list[Group]:
    """The groups of all ranks' batches, with the statistics of this one."""
    if ranks is None:
        return groups
    orders = ranks.exchange([[entry.fqn for entry in group.entries] for group in groups])
    by_name = {entry.fqn: entry for entry in entries}
    own = {entry.fqn: group.statistics for group in groups for entry in group.entries}
    needs = {entry.fqn: group.statistics[0].need for group in groups for entry in group.entries}
    need = next(iter(needs.values()), ())
    found = []
    for names in merged_orders(orders):
        count = matrix_shape(tuple(by_name[names[0]].tensor.shape), by_name[names[0]].owners[0])[0]
        nothing = (Statistics(needs.get(names[0], need)),) * count
        found.append(Group([by_name[name] for name in names], own.get(names[0], nothing)))
    return found
