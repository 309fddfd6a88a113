"""What all experts of a list saw together, for those that saw few rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ao_core.calibration.gathering import Group
from ao_core.calibration.matrices import matrix_shape
from ao_core.calibration.observing import Note
from ao_core.calibration.ranks import Ranks, summed
from ao_core.calibration.statistics import Statistics
from ao_core.targets import Decision

__all__ = ["Pools"]


@dataclass(frozen=True)
class _List:
    """The children of a ModuleList or ModuleDict, which may be experts."""

    #: all weights in them
    entries: list[Decision] = field(default_factory=list)
    #: name of a weight in a child -> the weights of that name in all children
    alike: dict[str, list[Decision]] = field(default_factory=dict)


class Pools:
    """The lists of a model, and what their children saw.

    Children are experts if some saw more rows than others. What all of them saw is observed while all of
    them are as they were, so that it does not matter which are rewritten already.
    """

    def __init__(self, model: nn.Module, entries: Sequence[Decision]) -> None:
        self._found: dict[str, Statistics | None] = {}
        #: by the name of a weight, its list and its name there
        self._places: dict[str, tuple[_List, str]] = {}
        lists: dict[str, _List] = {}
        modules = dict(model.named_modules())
        for entry in entries:
            parts = entry.fqn.split(".")
            for depth in range(len(parts) - 2, 0, -1):
                name = ".".join(parts[:depth])
                if isinstance(modules.get(name), (nn.ModuleList, nn.ModuleDict)):
                    own, leaf = lists.setdefault(name, _List()), ".".join(parts[depth + 1 :])
                    own.entries.append(entry)
                    own.alike.setdefault(leaf, []).append(entry)
                    self._places[entry.fqn] = own, leaf
                    break

    def of(
        self,
        group: Group,
        seen: Sequence[Statistics],
        there: Collection[str],
        batches: int,
        run: Callable[[int, Sequence[Decision], Note], object],
        ranks: Ranks | None,
    ) -> Statistics | None:
        """What all experts saw, if a group is of one that saw fewer rows than it has columns; else None.

        Args:
            group: weights with the same inputs.
            seen: of their inputs.
            there: names of the weights that `run` can observe.
            batches: how many there are.
            run: (number of a batch, weights, note) runs what makes the inputs of the weights while they are
            as
                they were.
            ranks: among which batches are divided, if so.
        """
        first = group.entries[0]
        own, leaf = self._places.get(first.fqn, (None, ""))
        if own is None or len(seen) != 1 or not 0 < seen[0].rows < _columns(first):
            return None
        alike = own.alike[leaf]
        is_list = len(alike) > 1 and len({each.tensor.shape for each in alike}) == 1
        if not is_list or any(each.fqn not in there for each in alike):
            return None
        if first.fqn not in self._found:
            found = _together(alike, own.entries, seen[0], batches, run, ranks)
            self._found |= dict.fromkeys((each.fqn for each in alike), found)
        return self._found[first.fqn]


def _together(
    alike: Sequence[Decision],
    entries: Sequence[Decision],
    like: Statistics,
    batches: int,
    run: Callable[[int, Sequence[Decision], Note], object],
    ranks: Ranks | None,
) -> Statistics | None:
    pool, rows = Statistics(like.need), dict.fromkeys((each.fqn for each in alike), 0)

    def note(name: str, matrix: int, x: Tensor) -> None:
        nonlocal pool
        if name in rows:
            rows[name] += x.numel() // max(x.shape[-1], 1)
            pool = pool.absorb(x, x)

    for number in range(batches):
        run(number, entries, note)
    counts = [rows] if ranks is None else ranks.exchange(rows)
    (found,) = summed([pool.finish()], ranks)
    is_routed = len({sum(each[name] for each in counts) for name in rows}) > 1
    return found if is_routed else None


def _columns(entry: Decision) -> int:
    return matrix_shape(tuple(entry.tensor.shape), entry.owners[0])[2]
