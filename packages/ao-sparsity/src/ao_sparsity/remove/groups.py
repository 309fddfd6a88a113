"""Channels that have to go together: which there are in a model, and which cannot go, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ao_core.ext import ConfigError, checked
from ao_core.ext.graph import Axis, Inputs, Traced, among, atoms, coordinates, find
from ao_sparsity.remove.tracing import trace_for_removal

__all__ = ["ChannelGroup", "Site", "channel_groups", "groups_of"]

#: a dimension of a parameter or buffer: its name and the dimension
Site: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of which each can only go as a whole: from all `writers` and all `readers`.

    A channel is a hidden feature, a channel of a convolution, a head, or a position inside of all heads.
    """

    #: the first parameter that writes it, or else reads it, as "fc1.weight"
    name: str
    #: number of channels
    size: int
    #: dimensions along which channels are computed (rows of weights, biases, scales of norms)
    writers: tuple[Site, ...]
    #: dimensions over which matmuls sum (columns of weights); a tied weight may be both, and is here
    readers: tuple[Site, ...]
    #: why none of it can go; None: it can
    reason: str | None
    #: why what stays would have other values; None: it has the same
    inexact: str | None
    #: it is a part of something that can itself go, as the features of a head are
    inner: bool
    #: for each site, the channel that each of its indices belongs to (-1: to none); several times where
    #: the channels are several times, as in a matrix for queries and keys
    channels: Mapping[Site, tuple[Tensor, ...]] = field(repr=False, compare=False)

    def select(self, indices: Iterable[int]) -> dict[Site, list[int]]:
        """These channels as indices of the first site, for `remove_channels`.

        Raises:
            ConfigError: an index is not in 0 to `size` - 1.
        """
        wanted = sorted(set(indices))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.size:
            raise ConfigError(f"indices={wanted}: {self.name} has channels 0 to {self.size - 1}")
        chosen = torch.zeros(self.size, dtype=torch.bool)
        chosen[wanted] = True
        return {self.site: self.indices(self.site, chosen).nonzero().flatten().tolist()}

    def indices(self, site: Site, chosen: Tensor) -> Tensor:
        """True for the indices of a site that belong to chosen channels, (size,) of booleans."""
        return torch.stack([among(index, chosen) for index in self.channels[site]]).any(0)

    @property
    def site(self) -> Site:
        """The site that the group has its name from."""
        return (self.writers or self.readers)[0]


@checked
def channel_groups(model: nn.Module, example_inputs: Inputs) -> list[ChannelGroup]:
    """All groups of channels of a model, also those that cannot go, in the order of parameters.

    Sizes that the model's code holds are found out when something is removed, not here.

    Args:
        model: any module that `torch.export` can trace; it is traced in evaluation mode, not changed.
        example_inputs: a tuple of positional arguments, a mapping of named ones, or one tensor.

    Raises:
        RemovalError: the model cannot be exported with these inputs.
    """
    return list(groups_of(trace_for_removal(model, example_inputs)).values())


def groups_of(traced: Traced) -> dict[Axis, ChannelGroup]:
    """The groups of a traced model by their atoms."""
    channels: dict[Axis, dict[Site, tuple[Tensor, ...]]] = {}
    for name, axes in traced.tensors.items():
        for dim, axis in enumerate(axes):
            for atom, index in coordinates(axis):
                if atom.size > 1:
                    sites = channels.setdefault(atom, {})
                    sites[name, dim] = (*sites.get((name, dim), ()), index)
    reading = _reading(traced)
    inner = _inner(traced)
    return {
        atom: _group(atom, found, reading.get(atom, set()), inner=atom in inner)
        for atom, found in channels.items()
    }


def _group(
    atom: Axis, channels: dict[Site, tuple[Tensor, ...]], reading: set[Site], *, inner: bool
) -> ChannelGroup:
    writers = tuple(site for site in channels if site not in reading)
    readers = tuple(site for site in channels if site in reading)
    reason = atom.fixed or (None if readers else "no weight reads it")
    name = (writers or readers)[0][0]
    return ChannelGroup(name, atom.size, writers, readers, reason, atom.inexact, inner, channels)


def _reading(traced: Traced) -> dict[Axis, set[Site]]:
    """For each atom, the dimensions of parameters through which matmuls read it."""
    found: dict[Axis, set[Site]] = {}
    for read in traced.facts.reads:
        wanted = set(atoms(read.axis))
        for name in read.parameters:
            for dim, axis in enumerate(traced.tensors[name]):
                for atom in wanted.intersection(atoms(axis)):
                    found.setdefault(atom, set()).add((name, dim))
    return found


def _inner(traced: Traced) -> set[Axis]:
    """Atoms that are repeated in each index of another that can go."""
    found: set[Axis] = set()

    def visit(axis: Axis, inside: bool) -> None:
        axis = find(axis)
        for part in axis.segments:
            visit(part, inside)
        for part in axis.factors:
            visit(part, inside)
            inside = inside or any(atom.fixed is None for atom in atoms(part))
        if inside and not axis.factors and not axis.segments:
            found.add(axis)

    for axes in traced.tensors.values():
        for axis in axes:
            visit(axis, False)
    return found
