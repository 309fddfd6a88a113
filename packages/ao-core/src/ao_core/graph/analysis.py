"""Scale groups and rotation sites of a model, and what was not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.graph.axes import Axis, atoms, coordinates
from ao_core.graph.copies import names_of, tensors_of
from ao_core.graph.export import Inputs
from ao_core.graph.rotation_rules import Passes, Reading, passes_of
from ao_core.graph.rotations import Fold, OnlineSite, RotatedDimension, RotationSite, unfoldable
from ao_core.graph.scales import ScaleGroup, groups_of
from ao_core.graph.tracing import Traced, trace

__all__ = ["ModelGraph", "analyze"]


@dataclass(frozen=True)
class ModelGraph:
    """What of a model's parameters may change while its outputs stay the same."""

    #: parameters that may be scaled against each other
    scale_groups: tuple[ScaleGroup, ...]
    #: dimensions of parameters that may be rotated together
    rotation_sites: tuple[RotationSite, ...]
    #: matmuls whose activations can only be rotated while the model runs
    online_sites: tuple[OnlineSite, ...]
    #: sentences on what cannot be scaled or rotated for want of a rule, or by what stands in the way
    notes: tuple[str, ...]


def analyze(
    model: nn.Module, example_inputs: Inputs, select: Callable[[Any], Any] | None = None
) -> ModelGraph:
    """Find scale groups and rotation sites by rules of operations; the model is not changed.

    Args:
        model: any module that `torch.export` can trace; it is traced in evaluation mode.
        example_inputs: a tuple of positional arguments, a mapping of named ones, or one tensor.
        select: what of the model's outputs has to stay, as `lambda output: output.logits`; all by default.

    Raises:
        GraphError: the model cannot be exported with these inputs, or not be copied.
    """
    traced = trace(model, example_inputs, select=select)
    notes: list[str] = []
    groups = groups_of(traced, tensors_of(model), notes)
    finder = _Finder(model, traced, passes_of(traced), groups, notes)
    sites, online = finder.sites()
    return ModelGraph(tuple(groups), tuple(sites), tuple(online), tuple(notes))


@dataclass
class _Finder:
    """Makes records of what the passes over a traced model found."""

    model: nn.Module
    traced: Traced
    passes: Passes
    groups: list[ScaleGroup]
    notes: list[str]

    def __post_init__(self) -> None:
        self.tensors = tensors_of(self.model)
        self.saved = set(self.model.state_dict())

    def sites(self) -> tuple[list[RotationSite], list[OnlineSite]]:
        places = self._places()
        found: dict[Axis, RotationSite | None] = {}
        online: list[OnlineSite] = []
        for reading in self.passes.readings:
            for atom in atoms(reading.axis):
                if atom.size > 1 and atom not in found:
                    found[atom] = self._site(atom, places.get(atom, {}))
            here = [atom for atom in atoms(reading.axis) if atom.size > 1]
            if not any(found[atom] for atom in here):
                online += self._online(reading, here)
        return [site for site in found.values() if site], online

    def _places(self) -> dict[Axis, dict[tuple[str, int], list[Tensor]]]:
        """For each atom the dimensions that have it, with the atom's index of each of theirs."""
        found: dict[Axis, dict[tuple[str, int], list[Tensor]]] = {}
        for name, axes in self.traced.tensors.items():
            for dim, axis in enumerate(axes):
                for atom, index in coordinates(axis):
                    if atom.size > 1:
                        found.setdefault(atom, {}).setdefault((name, dim), []).append(index)
        return found

    def _reason(self, atom: Axis) -> str | None:
        """Why an atom cannot be rotated, but for norms."""
        return self.passes.blocked.get(atom) or atom.fixed

    def _site(
        self, atom: Axis, places: Mapping[tuple[str, int], list[Tensor]]
    ) -> RotationSite | None:
        if self._reason(atom):
            return None
        folds = self._folds(atom, places)
        if folds is None:
            return None
        reading = {
            (name, dim)
            for read in self.passes.readings
            if atom in atoms(read.axis)
            for name in read.parameters
            for dim, axis in enumerate(self.traced.tensors[name])
            if atom in atoms(axis) and _same(axis, read.axis)
        }
        norms = {fold.parameter for fold in folds}
        dimensions = {
            key: RotatedDimension(*key, torch.cat([_copies(index, atom.size) for index in found]))
            for key, found in places.items()
            if key[0] not in norms
        }
        writers = tuple(d for key, d in dimensions.items() if key not in reading)
        readers = tuple(d for key, d in dimensions.items() if key in reading)
        unfit = next(filter(None, (self._unfit(name) for name, _ in dimensions)), None)
        if unfit:
            self.passes.blocked[atom] = unfit
            return None
        if not readers or not (writers or atom in self.passes.streams):
            return None
        inside = any(len(d.indices) > 1 for d in readers)
        kind = "residual" if atom in self.passes.streams else "heads" if inside else "hidden"
        name = (writers or readers)[0].parameter
        keeps = atom in self.passes.centered
        return RotationSite(name, atom.size, kind, writers, readers, folds, keeps)

    def _unfit(self, name: str) -> str | None:
        """Why a tensor cannot take a rotation."""
        tensor = self.tensors[name]
        if type(tensor.data) not in (Tensor, nn.Parameter) or not tensor.is_floating_point():
            return f"{name} is not a plain tensor of floating-point numbers"
        if not isinstance(tensor, nn.Parameter) and name not in self.saved:
            return f"{name} is a buffer that is not saved with the model"
        return None

    def _folds(
        self, atom: Axis, places: Mapping[tuple[str, int], list[Tensor]]
    ) -> tuple[Fold, ...] | None:
        """The norms to fold; None, with a blocked atom, where one cannot be."""
        norms = self.passes.norms.get(atom, {})
        folds = []
        for name in norms:
            group = next(
                (g for g in self.groups if any(s.parameter == name for s in g.producers)), None
            )
            why = (
                "something else than products with weights that can take it reads them"
                if group is None
                else unfoldable(group, name, list(norms))
            )
            if why or group is None:
                self.passes.blocked[atom] = (
                    f"{name} is a factor for each channel and cannot move into what reads them: "
                    f"{why}{self._tied(places)}"
                )
                return None
            folds.append(Fold(name, group))
        return tuple(folds)

    def _tied(self, places: Mapping[tuple[str, int], list[Tensor]]) -> str:
        """A sentence on a tensor with several names that has these channels."""
        first = names_of(self.model)
        for name, _ in places:
            names = [other for other, one in first.items() if one == name]
            if len(names) > 1:
                return (
                    f" ({' and '.join(names)} are one tensor: if that is what reads it, untie them)"
                )
        return ""

    def _online(self, reading: Reading, here: list[Axis]) -> list[OnlineSite]:
        """Sites before a product whose input cannot be rotated, or a sentence."""
        (name, *_) = sorted(reading.parameters)
        reasons = [reason for reason in map(self._reason, here) if reason]
        why = reasons[0] if reasons else "no parameter writes it"
        axes = self.traced.tensors[name]
        dims = [dim for dim, axis in enumerate(axes) if axis is reading.axis]
        owned = name.rpartition(".")[0] == reading.owner
        if any(atom in self.passes.streams for atom in here):
            hint = ""
        elif len(axes) == 2 and dims and owned and len(reading.parameters) == 1:
            return [OnlineSite(name, dims[0], reading.axis.size, reading.owner)]
        else:
            hint = "; an online rotation is for a matrix that is the weight of a module of its own"
        if not any(why in note for note in self.notes):
            self.notes.append(
                f"the {reading.axis.size} channels that {name} reads are not rotated: {why}{hint}"
            )
        return []


def _same(one: Axis, other: Axis) -> bool:
    return one is other or atoms(one) == atoms(other)


def _copies(index: Tensor, size: int) -> Tensor:
    """Where each index of an atom is in a dimension, a row for each copy: (copies, size)."""
    where = (index >= 0).nonzero().flatten()
    order = torch.argsort(index[where], stable=True)
    return where[order].reshape(size, -1).t().contiguous()
