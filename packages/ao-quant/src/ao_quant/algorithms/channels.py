"""Input channels that can be divided by factors, the weights that read them, and where the factors go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ao_core import Config
from ao_core.ext import SCALE, ChosenSteps, GraphError, WeightConfig, is_conv, is_transposed
from ao_core.ext.calibration import (
    Inputs,
    Sample,
    Statistic,
    Statistics,
    matrices,
    unobservable,
    visit,
)
from ao_core.ext.graph import ModelGraph, ScaledDimension, ScaleGroup, analyze, proven, scaled
from ao_core.ext.quantizing import Decision
from ao_quant.configs import GGUFWeightOnlyConfig, StaticConfig

__all__ = [
    "Channels",
    "Folding",
    "Found",
    "Reader",
    "fold",
    "format_of",
    "graph_of",
    "no_step",
    "over_channels",
    "proven_all",
    "spread",
]

T = TypeVar("T")
#: a change of a model's tensors that keeps its outputs, see `ao_core.ext.graph.prove`
_Change = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Reader:
    """A weight that reads channels."""

    entry: Decision
    #: (E, K) int64: the channel of each of its columns, -1 where it is no channel of these
    channels: Tensor = field(repr=False)
    #: of the inputs of each of its E matrices
    statistics: tuple[Statistics, ...] = field(repr=False)

    @property
    def weight(self) -> Tensor:
        """(E, N, K)."""
        return matrices(self.entry.tensor.detach(), self.entry.owners[0])

    @property
    def format(self) -> WeightConfig | None:
        """What it is going to be quantized to, where that is known."""
        return format_of(self.entry.config)

    def columns(self, factors: Tensor) -> Tensor:
        """(E, K): the factor of each column, of those of the channels."""
        found = factors[self.channels.clamp(min=0)]
        return torch.where(self.channels >= 0, found, torch.ones_like(found))


@dataclass(frozen=True)
class Channels:
    """Channels that readers share: what makes them is divided by factors, and the readers are multiplied."""

    size: int
    readers: tuple[Reader, ...]
    #: what makes them; None: nothing that could be divided, so that it is done before each matmul
    group: ScaleGroup | None
    #: why there is no group
    reason: str = ""

    def without_statistics(self) -> Channels:
        """The same, which holds no statistics any more."""
        return replace(self, readers=tuple(replace(each, statistics=()) for each in self.readers))


#: channels, one factor for each, and a few words on them
Found = tuple[Channels, Tensor, str]


def format_of(config: Config | None) -> WeightConfig | None:
    """The format that a configuration stores weights in; None where it is not one of weights.

    Of static scales that are still to be found it is the one whose scales each call computes.
    """
    found = getattr(config, "base", config)
    if isinstance(found, StaticConfig) and found.act_scale is None:
        return found.dynamic()
    return found if isinstance(found, WeightConfig) else None


def graph_of(model: nn.Module, batches: Sequence[Sample]) -> tuple[ModelGraph | None, str]:
    """The graph of a model, or why there is none."""
    try:
        return analyze(model, batches[0]), ""
    except GraphError as error:
        return None, str(error)


def over_channels(
    model: nn.Module,
    weights: Sequence[Decision],
    batches: Sequence[Sample],
    need: tuple[Statistic, ...],
    notes: dict[str, str],
    find: Callable[[Channels], T | None],
) -> list[T]:
    """What `find` makes of all inputs of weights; those that a scale group of the graph makes have the group.

    The statistics of a block are there while its inputs are, so what is found should not hold them.

    Args:
        model: dense.
        weights: of it, which are going to be quantized.
        batches: of data; the first traces the model.
        need: what is needed of the inputs.
        notes: gets why a weight is left out.
        find: what is wanted of channels; None is left out.
    """
    visible = []
    for entry in weights:
        if reason := unobservable(entry):
            notes[entry.fqn] = reason
        elif entry.steps is not None:
            notes[entry.fqn] = "it has input steps, which factors of channels do not go through"
        else:
            visible.append(entry)
    graph, reason = graph_of(model, batches)
    reason = reason or "nothing that makes them can be divided"
    groups = [] if graph is None else _grouped(graph, {entry.fqn: entry for entry in visible})
    place_of = {name: place for place, (_, sites) in enumerate(groups) for name in sites}
    left = [set(sites) for _, sites in groups]
    readers: list[list[Reader]] = [[] for _ in groups]
    found: list[T | None] = [None for _ in groups]

    def ask(place: int) -> None:
        found[place] = find(
            Channels(groups[place][0].size, tuple(readers[place]), groups[place][0])
        )
        readers[place].clear()

    def take(together: Sequence[tuple[Decision, Inputs]]) -> None:
        loose = []
        for entry, inputs in together:
            if (place := place_of.get(entry.fqn)) is None:
                loose.append(_reader(entry, None, inputs.statistics))
                continue
            site = groups[place][1][entry.fqn]
            readers[place].append(_reader(entry, site.channels, inputs.statistics))
            left[place].discard(entry.fqn)
            if not left[place]:
                ask(place)
        for reader in list(loose):
            if text := no_step(reader.entry):
                notes[reader.entry.fqn] = f"{reason}, and {text}"
                loose.remove(reader)
        if loose:
            size = loose[0].channels.shape[1]
            found.append(find(Channels(size, tuple(loose), None, reason)))

    visit(model, batches, visible, lambda _: need, _unchanged, driver="once", before=take)
    for place, some in enumerate(readers):
        if some:  # data did not reach all of them
            ask(place)
    return [each for each in found if each is not None]


def _unchanged(entry: Decision, inputs: Inputs) -> None:
    return None


def _grouped(
    graph: ModelGraph, named: Mapping[str, Decision]
) -> list[tuple[ScaleGroup, dict[str, ScaledDimension]]]:
    """The scale groups whose consumers are columns of weights, with those that are going to be quantized."""
    found, taken = [], set[str]()
    for group in graph.scale_groups:
        here = {site.parameter: site for site in group.consumers if site.parameter in named}
        if not here or any(site.dim != _input_dim(named[name]) for name, site in here.items()):
            continue  # products of activations, as of queries and keys
        if taken & here.keys():
            continue
        taken |= here.keys()
        found.append((group, here))
    return found


def _input_dim(entry: Decision) -> int:
    if is_transposed(entry.owners[0]):
        return 0
    return 1 if is_conv(entry.tensor, entry.owners[0]) else entry.tensor.dim() - 1


def _reader(entry: Decision, channels: Tensor | None, statistics: tuple[Statistics, ...]) -> Reader:
    tensor, dim = entry.tensor, _input_dim(entry)
    table = torch.arange(tensor.shape[dim]) if channels is None else channels
    shape = [-1 if each == dim else 1 for each in range(tensor.dim())]
    wide = table.to(tensor.device).reshape(shape).expand(tensor.shape)
    return Reader(entry, matrices(wide, entry.owners[0])[:, 0].contiguous(), statistics)


def no_step(entry: Decision) -> str | None:
    """Why the inputs of a weight cannot be divided before the matmul."""
    if is_conv(entry.tensor, entry.owners[0]) or entry.tensor.dim() < 2:
        return "its inputs cannot be scaled before the matmul: it is no matrix"
    if isinstance(format_of(entry.config), GGUFWeightOnlyConfig):
        return "a GGUF file has no place for the factors of its inputs"
    return None


def spread(values: Tensor, reader: Reader, size: int, how: str) -> Tensor:
    """(size,): what all columns of a reader (E, K) have, reduced to their channels by "amax" or "mean"."""
    there = reader.channels >= 0
    found = torch.zeros(size, dtype=values.dtype, device=values.device)
    return found.scatter_reduce_(0, reader.channels[there], values[there], how, include_self=False)


@dataclass
class Folding:
    """Factors that were found, and what became of them."""

    model: nn.Module
    steps: dict[str, ChosenSteps] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, text: str) -> None:
        """Say one more thing of a parameter."""
        self.notes[name] = f"{self.notes[name]}; {text}" if name in self.notes else text


def fold(
    model: nn.Module,
    example: Sample,
    found: Sequence[Found],
    what: str,
) -> Folding:
    """Put factors into what makes the channels, or, where it cannot take them, into input steps.

    Args:
        model: not changed.
        example: by which the new model is proven.
        found: what was found of channels.
        what: the method, for notes.
    """
    made = Folding(model)
    into = {each.group.name: (each, factors) for each, factors, _ in found if each.group}
    changes = {name: _scaling(*pair) for name, pair in into.items()}
    made.model, wrong = proven_all(model, example, changes, what)
    for each, factors, text in found:
        failure = each.reason if each.group is None else wrong.get(each.group.name, "")
        where = ", ".join(site.parameter for site in each.group.producers) if each.group else ""
        if each.group and not failure:
            names = ", ".join(site.parameter for site in each.group.consumers)
            for site in each.group.producers:
                made.note(site.parameter, f"divided by the factors of {names}")
        for reader in each.readers:
            name = reader.entry.fqn
            if not failure:
                made.note(name, f"{what}: {text}, folded into {where}")
            else:
                if unfit := no_step(reader.entry):
                    made.note(name, f"{what}: undone, since {unfit}; {failure}")
                else:
                    made.note(name, f"{what}: {text}, as an input step: {failure}")
                    by = factors[reader.channels.clamp(min=0)].reciprocal().float()
                    by = torch.where(reader.channels >= 0, by, torch.ones_like(by))
                    scale = by[0] if len(by) == 1 else by[:, None]
                    made.steps[name] = ChosenSteps((SCALE,), scale)
    return made


def _scaling(channels: Channels, factors: Tensor) -> _Change:
    group = channels.group
    assert group is not None
    return lambda tensors: scaled(tensors, group, factors)


def proven_all(
    model: nn.Module, example: Any, changes: Mapping[str, _Change], what: str
) -> tuple[nn.Module, dict[str, str]]:
    """A copy of a model with all changes that keep its outputs, and why others were left out, by name."""
    if not changes:
        return model, {}

    def all_of_them(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for change in changes.values():
            found |= change({**tensors, **found})
        return found

    try:
        return proven(model, example, all_of_them, what=what), {}
    except GraphError as error:
        names = list(changes)
        if len(names) == 1:
            return model, {names[0]: str(error)}
    wrong: dict[str, str] = {}
    half = len(names) // 2
    for part in (names[:half], names[half:]):
        model, more = proven_all(model, example, {name: changes[name] for name in part}, what)
        wrong |= more
    return model, wrong
