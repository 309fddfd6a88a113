"""What sizes a model has when some channels are gone: of tensors, of results, and of attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ao_sparsity.remove.axes import Axis, coordinates
from ao_sparsity.remove.copies import sharing, tensors_of
from ao_sparsity.remove.tracing import Inputs, Traced, steps

__all__ = ["Attribute", "Attributes", "Smaller", "is_layer", "set_attributes", "stays"]

#: module and attribute
Attribute: TypeAlias = "tuple[str, str]"
#: new values
Attributes: TypeAlias = "dict[Attribute, Any]"


def stays(axis: Axis, gone: Mapping[Axis, Tensor]) -> Tensor:
    """True for the indices of an axis that stay."""
    found = torch.ones(axis.size, dtype=torch.bool)
    for atom, index in coordinates(axis):
        if atom in gone:
            found &= ~((index >= 0) & gone[atom][index])
    return found


def set_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Set attributes of modules."""
    for (fqn, name), value in attributes.items():
        setattr(model.get_submodule(fqn), name, value)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, of which operations declare all sizes."""
    return type(module).__module__.startswith("torch.nn.")


@dataclass
class Smaller:
    """A traced model as it would be without some channels."""

    model: nn.Module
    inputs: Inputs
    traced: Traced
    gone: Mapping[Axis, Tensor]
    _sizes: dict[Axis, int] = field(default_factory=dict)

    def size(self, axis: Axis) -> int:
        """How many indices of an axis stay."""
        if axis not in self._sizes:
            self._sizes[axis] = int(stays(axis, self.gone).sum())
        return self._sizes[axis]

    def wrong(self, attributes: Attributes) -> str | None:
        """The first operation that gives another shape than it should, with these attributes."""
        others: dict[str, Tensor] = {}
        for name, tensor in tensors_of(self.model).items():
            shape = [self.size(axis) for axis in self.traced.tensors[name]]
            if shape != list(tensor.shape):
                new = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                others[name] = (
                    nn.Parameter(new, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else new
                )
        smaller = sharing(self.model, others)
        set_attributes(smaller, attributes)
        try:
            found = steps(smaller, self.inputs)
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        if [step.name for step in found] != [step.name for step in self.traced.steps]:
            return "it runs other operations"
        for step, should in zip(found, self.traced.steps, strict=True):
            sizes = tuple(tuple(map(self.size, axes)) for axes in should.sizes)
            if step.sizes != sizes:
                where = repr(step.owner) if step.owner else "the model"
                return f"{step.name} in {where} gives {step.sizes}, not {sizes}"
        return None

    def declared(self) -> Attributes:
        """New values of attributes that layers keep the sizes of their weights in."""
        found: Attributes = {}
        for owner, name, axes in self.traced.facts.sizes:
            value = getattr(self.model.get_submodule(owner), name, None)
            if isinstance(axes, tuple):
                old: Any = tuple(axis.size for axis in axes)
                new: Any = tuple(map(self.size, axes))
            else:
                old, new = axes.size, self.size(axes)
            if value == old != new:
                found[owner, name] = new
        return found

    def options(self) -> dict[tuple[str, str, int], Attributes]:
        """Whole numbers in modules that are the old size of something they compute, and the new one.

        By class of module, attribute, and which of the new sizes that belong to the old one.
        """
        changes: dict[str, dict[int, set[int]]] = {}
        for step in self.traced.steps:
            for axis in (axis for axes in step.sizes for axis in axes):
                if self.size(axis) != axis.size:
                    new = changes.setdefault(step.owner, {}).setdefault(axis.size, set())
                    new.add(self.size(axis))
        declared = self.declared()
        found: dict[tuple[str, str, int], Attributes] = {}
        for fqn, sizes in changes.items():
            module = self.model.get_submodule(fqn)
            for name, value in vars(module).items():
                if type(value) is not int or is_layer(module) or (fqn, name) in declared:
                    continue
                for number, size in enumerate(sorted(sizes.get(value, ()))):
                    key = (type(module).__qualname__, name, number)
                    found.setdefault(key, {})[fqn, name] = size
        return found
