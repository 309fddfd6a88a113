"""What calibration keeps of the inputs of a weight: states that are added up, batch by batch.

A `Statistic` is two pure functions: the state of some rows, and the merge of two states. `Statistics` holds
the states of several of them. Merging is associative, so batches, ranks and resumed runs merge alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from ao_core.errors import ConfigError

__all__ = [
    "ABS_MAX",
    "ABS_SUMS",
    "CROSS",
    "HESSIAN",
    "RANGE",
    "SQUARES",
    "SUMS",
    "State",
    "Statistic",
    "Statistics",
    "is_sum",
    "merged",
    "merged_over_ranks",
    "sampled_rows",
    "union",
]

#: the tensors of a `Statistic`, by key
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Statistic:
    """One kind of statistic of the inputs of a weight."""

    #: what makes it another statistic than those of other names
    name: str
    #: the keys of its state; no other statistic of a weight may have them
    keys: tuple[str, ...]
    #: (rows (T, in) in any floating-point dtype, T > 0; number of rows seen before them) -> their state
    of: Callable[[Tensor, int], State]
    #: the states of two sets of rows -> the state of all of them; new tensors, or those that it was given
    merge: Callable[[State, State], State]
    #: (a state that nobody else has, rows as in `of`) -> the merge of both, which may be made in place, and
    #: what it leaves undone `finish` does; None: `merge` of what `of` gives
    into: Callable[[State, Tensor], State] | None = None
    #: (state, factor) -> the state of rows that count by a factor, for sums; others stay as they are
    times: Callable[[State, float], State] = lambda state, factor: state
    #: makes a state whole, in place, after `into`
    finish: Callable[[State], None] = lambda state: None
    #: in place of `of`, for statistics of pairs: (rows (T, in), the same rows (T, in) in the model as it was
    #: or None where they have no counterpart there) -> their state
    of_pairs: Callable[[Tensor, Tensor | None], State] | None = None

    def state(self, rows: Tensor, was: Tensor | None, before: int) -> State:
        """The state of rows, of which `before` were seen already, and of what they were."""
        return self.of(rows, before) if self.of_pairs is None else self.of_pairs(rows, was)


@dataclass(frozen=True)
class Statistics:
    """What is needed of the inputs of a weight, and what was seen of them so far; never changed in place.

    Example: ``Statistics((HESSIAN, SUMS)).add(x)["hessian"]``
    """

    #: the kinds of statistics that are kept
    need: tuple[Statistic, ...] = ()
    #: rows seen: tokens, or positions of a convolution
    rows: int = 0
    #: the states of all statistics, by key; empty until a row was seen
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def add(self, x: Tensor, was: Tensor | None = None) -> Statistics:
        """The statistics with activations (..., in) added.

        `was` has those of the model before any weight of it was rewritten, for statistics of pairs; None:
        they have no counterpart there.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return self
        pairs = None if was is None else was.detach().reshape(rows.shape)
        new: dict[str, Tensor] = {}
        for each in self.need:
            new |= each.state(rows, pairs, self.rows)
        return self.merge(Statistics(self.need, len(rows), new))

    def absorb(self, x: Tensor, was: Tensor | None = None) -> Statistics:
        """`add` where nobody else has these statistics: their tensors may be changed in place.

        `finish` must follow the last one.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        if not (self.rows and len(rows)):
            return self.add(x, was)
        pairs = None if was is None else was.detach().reshape(rows.shape)
        values: dict[str, Tensor] = {}
        for each in self.need:
            state = {key: self.values[key].to(rows.device) for key in each.keys}
            if each.into is None:
                values |= each.merge(state, each.state(rows, pairs, self.rows))
            else:
                values |= each.into(state, rows)
        return Statistics(self.need, self.rows + len(rows), values)

    def finish(self) -> Statistics:
        """These statistics, whole after `absorb`."""
        for each in self.need:
            if self.rows:
                each.finish({key: self.values[key] for key in each.keys})
        return self

    def times(self, factor: float) -> Statistics:
        """Of rows that count by a factor: sums are multiplied, what is no sum stays."""
        values: dict[str, Tensor] = {}
        for each in self.need:
            if self.rows:
                values |= each.times({key: self.values[key] for key in each.keys}, factor)
        return Statistics(self.need, round(self.rows * factor), values)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of the rows of both, on the device of `other`.

        Raises:
            ConfigError: they do not hold the same statistics.
        """
        if [each.name for each in self.need] != [each.name for each in other.need]:
            mine, its = ([each.name for each in one.need] for one in (self, other))
            raise ConfigError(f"statistics of {mine} cannot be merged with statistics of {its}")
        if not (self.rows and other.rows):
            return other if other.rows else self
        values: dict[str, Tensor] = {}
        for each in self.need:
            mine_, its_ = ({key: one.values[key] for key in each.keys} for one in (self, other))
            mine_ = {key: value.to(its_[key].device) for key, value in mine_.items()}
            values |= each.merge(mine_, its_)
        return Statistics(self.need, self.rows + other.rows, values)

    def __getitem__(self, key: str) -> Tensor:
        """One tensor of the states.

        Raises:
            ConfigError: nothing that was asked for has this key, or no row was seen.
        """
        if key in self.values:
            return self.values[key]
        known = [k for each in self.need for k in each.keys]
        reason = "no row was seen" if key in known else f"there are {', '.join(known) or 'none'}"
        raise ConfigError(f"statistics[{key!r}]: {reason}")

    @property
    def nbytes(self) -> int:
        """Memory of the states."""
        return sum(value.nbytes for value in self.values.values())

    def state_dict(self) -> dict[str, Tensor]:
        """All states as tensors, for `torch.save` or safetensors; `restored` is the inverse."""
        rows = torch.tensor(self.rows, dtype=torch.int64, device="cpu")
        return {"row_count": rows, **self.values}

    @classmethod
    def restored(cls, need: Sequence[Statistic], state: Mapping[str, Tensor]) -> Statistics:
        """The statistics that `state_dict` was called on.

        Raises:
            ConfigError: `state` is of other statistics.
        """
        keys = [key for each in need for key in each.keys]
        rows = int(state.get("row_count", torch.tensor(-1, device="cpu")))
        if rows < 0 or set(state) - {"row_count"} != set(keys if rows else ()):
            raise ConfigError(
                f"state has {sorted(state)}; statistics of {[each.name for each in need]} have row_count, "
                f"{', '.join(keys)}"
            )
        return cls(tuple(need), rows, {key: state[key] for key in keys if rows})


def union(needs: Sequence[Sequence[Statistic]]) -> tuple[Statistic, ...]:
    """All statistics that are needed, each once.

    Raises:
        ConfigError: two different ones have the same name.
    """
    found: dict[str, Statistic] = {}
    for each in (one for need in needs for one in need):
        if found.setdefault(each.name, each) != each:
            raise ConfigError(f"two different statistics are named {each.name!r}")
    return tuple(found.values())


def merged(statistics: Sequence[Statistics]) -> Statistics:
    """The statistics of all rows together, merged in order.

    Raises:
        ConfigError: they do not hold the same statistics.
    """
    return reduce(Statistics.merge, statistics)


def merged_over_ranks(statistics: Statistics, group: Any = None) -> Statistics:
    """The statistics of the rows of all ranks, merged in the order of ranks: the same bits on each.

    Args:
        statistics: those of this rank's rows.
        group: a process group of torch.distributed; None: the default one.

    Raises:
        ConfigError: the ranks do not hold the same statistics.
    """
    import torch.distributed as dist

    size = dist.get_world_size(group)
    states: list[Any] = [None] * size
    own = {key: value.cpu() for key, value in statistics.state_dict().items()}
    dist.all_gather_object(states, own, group)
    found = merged([Statistics.restored(statistics.need, state) for state in states])
    devices = {value.device for value in statistics.values.values()}
    values = {
        key: value.to(next(iter(devices), value.device)) for key, value in found.values.items()
    }
    return Statistics(found.need, found.rows, values)


def floats(rows: Tensor) -> Tensor:
    """Rows in float32, or in float64 where they are that."""
    return rows if rows.dtype == torch.float64 else rows.float()


def _added(a: State, b: State) -> State:
    return {key: value + b[key] for key, value in a.items()}


def _times(state: State, factor: float) -> State:
    return {key: value * factor for key, value in state.items()}


def is_sum(statistic: Statistic) -> bool:
    """Whether states are merged by addition."""
    return statistic.merge is _added


#: columns of a Hessian that are computed at a time, with those after them: what is below is the mirror image
_STRIP = 512


def _hessian(rows: Tensor, before: int) -> State:
    columns = rows.shape[-1]
    state = {"hessian": torch.zeros(columns, columns, dtype=torch.float64, device=rows.device)}
    _hessian_into(state, rows)
    _mirror(state)
    return state


def _hessian_into(state: State, rows: Tensor) -> State:
    """Add strip by strip, from the diagonal on."""
    x_TK, total = floats(rows), state["hessian"]
    for start in range(0, len(total), _STRIP):
        stop = start + _STRIP
        total[start:stop, start:] += x_TK[:, start:stop].t() @ x_TK[:, start:]
    return state


def _mirror(state: State) -> None:
    """Copy what is above the diagonal to below; the blocks of strips on it are whole."""
    total = state["hessian"]
    for start in range(0, len(total), _STRIP):
        stop = start + _STRIP
        total[stop:, start:stop] = total[start:stop, stop:].t()


#: "hessian": Σ x xᵀ (in, in), without a factor; the matmul of a batch in float32, their sum in float64
HESSIAN = Statistic("hessian", ("hessian",), _hessian, _added, _hessian_into, _times, _mirror)


def _cross(rows: Tensor, was: Tensor | None) -> State:
    x_TK, unpaired = floats(rows), 0 if was is not None else len(rows)
    was_TK = x_TK if was is None else floats(was).to(x_TK)
    count = torch.tensor([float(unpaired)], dtype=torch.float64, device=rows.device)
    return {"cross": (was_TK.t() @ x_TK).double(), "unpaired": count}


def _of_no_rows(rows: Tensor, before: int) -> State:
    raise ConfigError("statistics of pairs have no state of rows alone")


#: "cross": Σ x̃ xᵀ (in, in), x̃ being what x was in the model before any weight of it was rewritten; the
#: matmul of a batch in float32, their sum in float64. "unpaired": (1,), the rows without an x̃ (in a model
#: whose routing has changed), for which x takes its place
CROSS = Statistic(
    "cross", ("cross", "unpaired"), _of_no_rows, _added, times=_times, of_pairs=_cross
)

#: "sums": Σ x (in,), float64
SUMS = Statistic(
    "sums",
    ("sums",),
    lambda rows, before: {"sums": rows.sum(0, dtype=torch.float64)},
    _added,
    times=_times,
)

#: "squares": Σ x² (in,), float64: the diagonal of the Hessian
SQUARES = Statistic(
    "squares",
    ("squares",),
    lambda rows, before: {"squares": floats(rows).square().sum(0, dtype=torch.float64)},
    _added,
    times=_times,
)

#: "abs_sums": Σ |x| (in,), float64
ABS_SUMS = Statistic(
    "abs_sums",
    ("abs_sums",),
    lambda rows, before: {"abs_sums": floats(rows).abs().sum(0, dtype=torch.float64)},
    _added,
    times=_times,
)

#: "abs_max": the greatest magnitude of each input channel (in,), float32 or float64
ABS_MAX = Statistic(
    "abs_max",
    ("abs_max",),
    lambda rows, before: {"abs_max": floats(rows).abs().amax(0)},
    lambda a, b: {"abs_max": torch.maximum(a["abs_max"], b["abs_max"])},
)

#: "min" and "max": least and greatest value of each input channel (in,), float32 or float64
RANGE = Statistic(
    "range",
    ("min", "max"),
    lambda rows, before: {"min": floats(rows).amin(0), "max": floats(rows).amax(0)},
    lambda a, b: {
        "min": torch.minimum(a["min"], b["min"]),
        "max": torch.maximum(a["max"], b["max"]),
    },
)


@cache
def sampled_rows(count: int, seed: int = 0) -> Statistic:
    """A uniform sample of rows without replacement: "sample" (count, in) and "priority" (count,).

    Each row gets a priority, a hash of the seed and its number, and those with the greatest stay. So the
    sample does not depend on how rows are divided into batches, a resumed run continues the same one, and no
    generator of torch is touched. Ranks need different seeds to sample independently. Rows are in the order
    of their priorities, in the dtype that they had.

    Args:
        count: rows that are kept, at most; all where fewer were seen.
        seed: of the priorities.

    Raises:
        ConfigError: `count` is not positive.
    """
    if count < 1:
        raise ConfigError(f"count={count!r}: need a positive number of rows")

    def best(sample: Tensor, priority: Tensor) -> State:
        order = priority.argsort(descending=True, stable=True)[:count]
        return {"sample": sample[order], "priority": priority[order]}

    def of(rows: Tensor, before: int) -> State:
        numbers = torch.arange(before, before + len(rows), device=rows.device)
        return best(rows, _mixed(numbers + _mixed(torch.tensor([seed], device=rows.device))))

    def merge(a: State, b: State) -> State:
        return best(*(torch.cat([a[key], b[key]]) for key in ("sample", "priority")))

    return Statistic(f"sampled_rows({count}, {seed})", ("sample", "priority"), of, merge)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea and Flood 2014) of int64 numbers, as int64: a hash of each."""
    x = x * -7046029254386353131 + 1442695040888963407
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x
