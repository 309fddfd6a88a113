"""Calibration by several processes: each runs its own batches, and what they saw is added up.

Every collective operation begins with `Ranks.exchange`, which tells of errors, too. So a rank that fails
takes part in the next one with its error, and no other waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from ao_core.calibration.samples import Sample
from ao_core.calibration.statistics import Statistics, is_sum
from ao_core.errors import ConfigError, QuantizationError

__all__ = [
    "OverRanks",
    "Ranks",
    "added",
    "merged_orders",
    "over_ranks",
    "ranks_of",
    "shares",
    "summed",
    "telling",
]

T = TypeVar("T")


class RankError(QuantizationError):
    """Another rank failed."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a group of torch.distributed."""

    group: Any = None

    @property
    def rank(self) -> int:
        """The number of this one."""
        return torch.distributed.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many they are."""
        return torch.distributed.get_world_size(self.group)

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, in their order.

        Raises:
            RankError: one of them failed.
        """
        found = self._gather("", value)
        for rank, (error, _) in enumerate(found):
            if error:
                raise RankError(f"rank {rank} failed: {error}")
        return [each for _, each in found]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Within this context an error is told to the other ranks."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self._gather(f"{type(error).__name__}: {error}", None)
            raise

    def _gather(self, error: str, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, (error, value), self.group)
        return found


@dataclass(frozen=True)
class OverRanks(Sequence[Sample]):
    """Batches of this rank; statistics of their inputs are added up over all ranks."""

    #: inputs of the model
    batches: tuple[Sample, ...]
    #: a process group of torch.distributed; None: the default one
    group: Any = field(default=None, repr=False)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        return self.batches[place]

    def __len__(self) -> int:
        return len(self.batches)


def over_ranks(batches: Sequence[Sample], group: Any = None) -> OverRanks:
    """This rank's share of batches that all ranks have: every so-manieth one.

    `quantize_(model, config, data=over_ranks(batches))`, called by all ranks with the same model, gives all
    of them the model that one process gives with all batches, but for the order of sums. Ranks that have
    different batches pass `OverRanks(own_batches)`.

    Args:
        batches: all of them, a list of inputs of the model.
        group: a process group of torch.distributed; None: the default one.

    Raises:
        ConfigError: there is no process group, or there are fewer batches than ranks.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ConfigError(
            "over_ranks: torch.distributed has no process group; call init_process_group first, in programs "
            "that torchrun starts"
        )
    ranks, found = Ranks(group), list(batches)
    if len(found) < ranks.size:
        raise ConfigError(
            f"data: {len(found)} batches for {ranks.size} ranks; give each rank at least one, of fewer rows"
        )
    return OverRanks(tuple(found[ranks.rank :: ranks.size]), group)


def ranks_of(batches: object) -> Ranks | None:
    """The ranks that batches are divided among; None: there is one process."""
    return Ranks(batches.group) if isinstance(batches, OverRanks) else None


def telling(batches: object) -> AbstractContextManager[None]:
    """A context in which errors are told to the other ranks, if batches are divided among some."""
    ranks = ranks_of(batches)
    return nullcontext() if ranks is None else ranks.telling()


def summed(parts: Sequence[Statistics], ranks: Ranks | None) -> tuple[Statistics, ...]:
    """Statistics of the rows of all ranks; those of this rank are used up."""
    if ranks is None:
        return tuple(parts)
    described = ranks.exchange(
        [
            (
                part.rows,
                {
                    key: (value.shape, value.dtype, value.device.type)
                    for key, value in part.values.items()
                },
            )
            for part in parts
        ]
    )
    found = []
    for number, part in enumerate(parts):
        of_ranks = [each[number] for each in described]
        rows = sum(count for count, _ in of_ranks)
        shapes = next((known for count, known in of_ranks if count), {})
        values = {
            key: part.values[key] if part.rows else torch.zeros(shape, dtype=dtype, device=device)
            for key, (shape, dtype, device) in shapes.items()
        }
        if rows and all(map(is_sum, part.need)):
            for value in values.values():
                torch.distributed.all_reduce(value, group=ranks.group)
            part = Statistics(part.need, rows, values)
        elif rows:
            states = ranks.exchange(part.state_dict())
            part = Statistics(part.need)
            for state in states:
                part = part.merge(Statistics.restored(part.need, state))
        found.append(part)
    return tuple(found)


def added(tensors: Sequence[Tensor], ranks: Ranks | None) -> list[Tensor]:
    """The sums of tensors over all ranks, with the same bits on each; those of this rank are used up."""
    if ranks is None:
        return list(tensors)
    ranks.exchange(None)
    for tensor in tensors:
        torch.distributed.all_reduce(tensor, group=ranks.group)
    return list(tensors)


def shares(items: Sequence[T], ranks: Ranks, do: Callable[[T], Any]) -> list[Any]:
    """What `do` gives for each item, of which each rank does its share."""
    own = {n: do(item) for n, item in enumerate(items) if n % ranks.size == ranks.rank}
    found: dict[int, Any] = {}
    for each in ranks.exchange(own):
        found |= each
    return [found[n] for n in range(len(items))]


def merged_orders(orders: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Groups of names that are together wherever they are, in the order of the first that has them.

    A name that others before do not have comes right after that which precedes it in its own order.
    """
    names: list[str] = []
    for order in orders:
        place = 0
        for name in (name for group in order for name in group):
            if name in names:
                place = names.index(name) + 1
            else:
                names.insert(place, name)
                place += 1
    of_name: dict[str, list[int]] = {name: [-1] * len(orders) for name in names}
    for which, order in enumerate(orders):
        for number, group in enumerate(order):
            for name in group:
                of_name[name][which] = number
    found: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        found.setdefault(tuple(of_name[name]), []).append(name)
    return list(found.values())
