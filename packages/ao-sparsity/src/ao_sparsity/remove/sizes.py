"""What sizes a model has when some channels are gone: of tensors, of results, and of attributes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ao_core.ext.graph import Axis, Inputs, Traced, among, coordinates, sharing, steps, tensors_of

__all__ = [
    "Attribute",
    "Attributes",
    "Smaller",
    "Wrong",
    "is_layer",
    "kind",
    "set_attributes",
    "stays",
]

#: module and attribute
Attribute: TypeAlias = "tuple[str, str]"
#: new values
Attributes: TypeAlias = "dict[Attribute, Any]"


def stays(axis: Axis, gone: Mapping[Axis, Tensor]) -> Tensor:
    """True for the indices of an axis that stay."""
    found = torch.ones(axis.size, dtype=torch.bool)
    for atom, index in coordinates(axis):
        if atom in gone:
            found &= ~among(index, gone[atom])
    return found


def set_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Set attributes of modules."""
    for (fqn, name), value in attributes.items():
        setattr(model.get_submodule(fqn), name, value)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, of which operations declare all sizes."""
    return type(module).__module__.startswith("torch.nn.")


def kind(name: str) -> str:
    """A name without its numbers: the same for all layers of a stack."""
    return re.sub(r"\d+", "#", name)


class Wrong(NamedTuple):
    """That a smaller model does not run as it should: in which module, and what it is."""

    owner: str
    text: str


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

    def wrong(self, attributes: Attributes) -> Wrong | None:
        """What first goes another way than it should, with these attributes; None: nothing does."""
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
            with _unlogged():
                found = steps(smaller, self.inputs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            return Wrong(_where(error, smaller), text)
        for step, should in zip_longest(found, self.traced.steps):
            if step is None or should is None or step.name != should.name:
                return Wrong((step or should).owner, "it runs other operations")
            sizes = tuple(tuple(map(self.size, axes)) for axes in should.sizes)
            if step.sizes != sizes:
                return Wrong(step.owner, f"{step.name} gives {step.sizes}, not {sizes}")
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

        By kind of module, attribute, and which of the new sizes that belong to the old one.
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
                    found.setdefault((kind(fqn), name, number), {})[fqn, name] = size
        return found


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without the log of shapes that do not fit, which are what is looked for."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _where(error: BaseException, model: nn.Module) -> str:
    """The innermost module whose code an error came out of."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found
