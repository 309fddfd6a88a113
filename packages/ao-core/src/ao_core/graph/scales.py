"""Scale groups: which parameters may be scaled against each other while the model computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.errors import ConfigError
from ao_core.graph.calls import Call
from ao_core.graph.labels import Labels
from ao_core.graph.scale_rules import block_all, operands, rule_for
from ao_core.graph.scale_values import NONE, Scaling, Value
from ao_core.graph.tracing import Traced
from ao_core.mapped import spilled

__all__ = ["ScaleGroup", "ScaledDimension", "factors_of", "groups_of", "scaled"]


@dataclass(frozen=True)
class ScaledDimension:
    """A dimension of a parameter along which a group scales."""

    #: its name
    parameter: str
    #: which of its dimensions
    dim: int
    #: +1: indices are multiplied by the scale of their channel, -1: divided by it
    exponent: int
    #: for each index of the dimension its channel, -1 where it has none (int64). A channel may be there
    #: several times, as where query heads share a head of keys and values
    channels: Tensor = field(repr=False, compare=False)
    #: what the model adds to the parameter before it uses it: 1.0 for norms that compute with 1 + weight
    offset: float = 0.0


@dataclass(frozen=True)
class ScaleGroup:
    """Channels whose scale may move from the parameters that make them to those that read them.

    Dividing all `producers` and multiplying all `consumers` by one scale per channel changes no output of
    the model. In `softmax(QKᵀ)` nothing reads: there the projection of queries is the producer, and
    that of keys the consumer.
    """

    #: the first producer, as "model.layers.0.mlp.up_proj.weight"
    name: str
    #: number of channels
    size: int
    producers: tuple[ScaledDimension, ...]
    consumers: tuple[ScaledDimension, ...]
    #: only positive scales keep the outputs, as through a ReLU; else any scale but 0 does
    positive: bool

    @property
    def dimensions(self) -> tuple[ScaledDimension, ...]:
        """Producers and consumers."""
        return self.producers + self.consumers


def scaled(tensors: Mapping[str, Tensor], group: ScaleGroup, scales: Tensor) -> dict[str, Tensor]:
    """The parameters of a group, scaled; nothing is changed in place.

    Args:
        tensors: the model's tensors by name, as `tensors_of(model)` gives them.
        group: where to scale.
        scales: one scale per channel, shape (group.size,).

    Returns:
        New values of the group's parameters in their own dtypes, computed in float64.

    Raises:
        ConfigError: scales of another shape, not finite, zero, or negative where only positive ones work.
    """
    if scales.shape != (group.size,):
        raise ConfigError(
            f"scales: {group.name} has {group.size} channels, but the shape is {tuple(scales.shape)}"
        )
    allowed = scales > 0 if group.positive else scales != 0
    if not bool((allowed & scales.isfinite()).all()):
        wanted = "finite and positive" if group.positive else "finite and not zero"
        raise ConfigError(f"scales: those of {group.name} have to be {wanted}")
    found: dict[str, Tensor] = {}
    for site in group.dimensions:
        old = tensors[site.parameter].detach()
        factors = factors_of(site, scales.to(old.device, torch.float64))
        factors = factors.reshape([-1 if dim == site.dim else 1 for dim in range(old.ndim)])
        now = found.get(site.parameter, old.double()) + site.offset
        now = now * factors if site.exponent > 0 else now / factors
        found[site.parameter] = now - site.offset
    return {name: spilled(value.to(tensors[name].dtype)) for name, value in found.items()}


def factors_of(site: ScaledDimension, scales: Tensor) -> Tensor:
    """For each index of a dimension the scale of its channel, 1 where it has none."""
    channels = site.channels.to(scales.device)
    return torch.where(channels >= 0, scales[channels.clamp(min=0)], torch.ones_like(scales[:1]))


@dataclass(frozen=True)
class _Site:
    """A dimension of a parameter, and the number of its first label."""

    parameter: str
    dim: int
    start: int
    size: int


def groups_of(traced: Traced, tensors: Mapping[str, Tensor], notes: list[str]) -> list[ScaleGroup]:
    """The scale groups of a traced model, in the order of parameters.

    Args:
        traced: the model, traced.
        tensors: its tensors by name.
        notes: gets a sentence for each kind of operation that scales cannot be followed through for want
            of a rule.
    """
    sites, state = _start(traced, tensors)
    for call in traced.calls:
        if call.output is not None:  # None: an assertion
            state.values[call.node] = _visit(state, call, notes)
    for node in traced.outputs:
        state.block(*_flat(state.values.get(node, NONE)))
    for name, offsets in state.offsets.items():
        if len(offsets) > 1:
            state.block(*(Value((_numbers(site),)) for site in sites if site.parameter == name))
    return _collected(sites, state)


def _start(traced: Traced, tensors: Mapping[str, Tensor]) -> tuple[list[_Site], Scaling]:
    """Each index of each dimension of a parameter is an unknown."""
    sites: list[_Site] = []
    used = set(traced.held.values())
    start = 1
    for name, tensor in tensors.items():
        plain = type(tensor.data) in (Tensor, nn.Parameter) and tensor.is_floating_point()
        if isinstance(tensor, nn.Parameter) and name in used and plain:
            for dim, size in enumerate(tensor.shape):
                if size > 1:
                    sites.append(_Site(name, dim, start, size))
                    start += size
    state = Scaling(Labels(start - 1))
    terms: dict[str, list[Tensor]] = {}
    for site in sites:
        shape = [-1 if dim == site.dim else 1 for dim in range(tensors[site.parameter].ndim)]
        terms.setdefault(site.parameter, []).append(_numbers(site).reshape(shape))
    for node, name in traced.held.items():
        if name in terms:
            state.values[node] = Value(tuple(terms[name]), (name, 0.0))
    return sites, state


def _numbers(site: _Site) -> Tensor:
    return torch.arange(site.start, site.start + site.size)


def _flat(found: Value | list[Value]) -> list[Value]:
    return found if isinstance(found, list) else [found]


def _visit(state: Scaling, call: Call, notes: list[str]) -> Value | list[Value]:
    rule = rule_for(call.name)
    given = [value for value in operands(state, call) if value.terms]
    if rule is None or not _static(call):
        if any(state.alive(value).terms for value in given) and not _is_function(call):
            text = (
                f"scales are not followed through the operation {call.name!r}, which has no rule "
                f"(in {call.owner or 'the model'})"
            )
            if not any(f"the operation {call.name!r}" in note for note in notes):
                notes.append(text)
        found: Value | list[Value] = block_all(state, call)
    else:
        found = rule(state, call)
    if not (isinstance(found, Value) and found.parameter):
        for value in given:
            if value.parameter:
                name, offset = value.parameter
                state.offsets.setdefault(name, set()).add(offset)
    return found


def _static(call: Call) -> bool:
    """Whether the sizes of what a call gives are numbers, not decided by values."""
    tensors = [t for t in pytree.tree_leaves(call.output) if isinstance(t, Tensor)]
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


#: functions of rows, none of which passes a scale
_FUNCTIONS = (
    *("softmax", "_softmax", "log_softmax", "_log_softmax"),
    *("max", "min", "amax", "amin", "argmax", "argmin", "topk", "sort"),
)


def _is_function(call: Call) -> bool:
    """A function of each element, or of a row, through which no scale passes: no rule is missing."""
    tags = getattr(call.node.target, "tags", ())
    return torch.Tag.pointwise in tags or call.name in _FUNCTIONS


def _collected(sites: list[_Site], state: Scaling) -> list[ScaleGroup]:
    """Unknowns that are equal or opposite, in groups of those that are in the same dimensions."""
    members: dict[int, list[tuple[int, int, int]]] = {}
    for number, site in enumerate(sites):
        roots = state.labels.find(_numbers(site)).tolist()
        for index, root in enumerate(roots):
            if root:
                members.setdefault(abs(root), []).append((number, 1 if root > 0 else -1, index))
    reading = set(
        torch.cat([t.flatten() for t in state.readers] or [torch.zeros(0)]).abs().tolist()
    )
    positive = state.labels.positive
    groups: dict[frozenset[tuple[int, int]], list[tuple[int, int]]] = {}
    for root, found in members.items():
        if len({sign for _, sign, _ in found}) < 2:
            continue  # nothing compensates it: no part of the model, or the operation forgets scales
        readers = [sign for site, sign, index in found if sites[site].start + index in reading]
        direction = readers[0] if readers else -found[0][1]
        key = frozenset((site, sign * direction) for site, sign, _ in found)
        groups.setdefault(key, []).append((root, direction))
    return [
        _group(sites, state, members, found, positive=bool(positive[[r for r, _ in found]].any()))
        for found in groups.values()
    ]


def _group(
    sites: list[_Site],
    state: Scaling,
    members: Mapping[int, list[tuple[int, int, int]]],
    roots: list[tuple[int, int]],
    *,
    positive: bool,
) -> ScaleGroup:
    tables: dict[tuple[int, int], list[int]] = {}
    for channel, (root, direction) in enumerate(roots):
        for number, sign, index in members[root]:
            key = (number, sign * direction)
            if key not in tables:
                tables[key] = [-1] * sites[number].size
            tables[key][index] = channel
    found = []
    for (number, exponent), channels in sorted(tables.items(), key=lambda item: item[0]):
        site = sites[number]
        offset = next(iter(state.offsets.get(site.parameter, {0.0})))
        table = torch.tensor(channels)
        found.append(ScaledDimension(site.parameter, site.dim, exponent, table, offset))
    producers = tuple(site for site in found if site.exponent < 0)
    consumers = tuple(site for site in found if site.exponent > 0)
    return ScaleGroup(producers[0].parameter, len(roots), producers, consumers, positive)
