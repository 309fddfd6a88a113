"""One call of an operation in a traced model: its arguments by name, and the axes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, fx

from ao_core.graph.axes import Axis, fix, unify

__all__ = ["Axes", "Call", "Facts", "Read"]

#: the axes of a tensor
Axes: TypeAlias = "list[Axis]"


@dataclass(frozen=True)
class Read:
    """A product sums over an axis: these parameters decide what of it is read."""

    parameters: frozenset[str]
    axis: Axis


@dataclass
class Facts:
    """What the calls of a model say, beside which axes are the same."""

    reads: list[Read] = field(default_factory=list)
    #: (module, attribute, axes): the attribute holds the size of this axis, or the sizes of these
    sizes: list[tuple[str, str, Axis | tuple[Axis, ...]]] = field(default_factory=list)


@dataclass
class Call:
    """A call. `bound` has the arguments by the names of the operator's schema."""

    name: str
    owner: str
    node: fx.Node
    bound: dict[str, Any]
    output: Any
    axes_of: dict[fx.Node, Any]
    #: what each tensor is computed from: parameters, or an input (None)
    sources: dict[fx.Node, frozenset[str] | None]
    facts: Facts

    def __getitem__(self, argument: str) -> Any:
        """An argument, or None where the operator has none of this name."""
        return self.bound.get(argument)

    def axes(self, argument: str) -> Axes:
        """The axes of a tensor."""
        found: Axes = self.axes_of[self.bound[argument]]
        return found

    def given(self, *arguments: str) -> Iterator[Axes]:
        """The axes of those of these tensors that are given."""
        for argument in arguments:
            if self[argument] is not None:
                yield self.axes(argument)

    def tensors(self) -> Iterator[Axes]:
        """The axes of all tensors among the arguments, also of those in lists."""
        for value in self.bound.values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, fx.Node) and self.axes_of.get(item) is not None:
                    yield self.axes_of[item]

    def dim(self, argument: str, ndim: int) -> int:
        """A dimension, counted from the front."""
        return int(self[argument]) % max(ndim, 1)

    @property
    def shape(self) -> list[int]:
        """The shape of the only output."""
        return list(self.output.shape)

    def fresh(self, sizes: Sequence[int], reason: str) -> Axes:
        """New axes of which nothing can go."""
        return [Axis(size, fixed=reason) for size in sizes]

    def unknown(self, reason: str) -> Any:
        """Nothing can go of what comes in and out."""
        for axes in self.tensors():
            for axis in axes:
                fix(axis, reason)
        if isinstance(self.output, Tensor):
            return self.fresh(self.shape, reason)
        if isinstance(self.output, (list, tuple)):
            return [
                self.fresh(item.shape, reason) if isinstance(item, Tensor) else None
                for item in self.output
            ]
        return None

    def broadcast(self, *operands: Axes) -> Axes:
        """The axes of the result of broadcasting, which all operands of that size share."""
        ndim = max(map(len, operands), default=0)
        found: Axes = []
        for dim in range(-ndim, 0):
            here = [axes[dim] for axes in operands if len(axes) >= -dim]
            real = [axis for axis in here if axis.size != 1] or here
            for axis in real[1:]:
                unify(real[0], axis)
            found.append(real[0])
        return found

    def contract(self, left: str, left_axis: Axis, right: str, right_axis: Axis) -> None:
        """The product sums over this axis of two operands."""
        unify(left_axis, right_axis)
        for operand in (right, left):
            parameters = self.sources.get(self.bound[operand])
            if parameters:
                self.facts.reads.append(Read(parameters, right_axis))
                return
        fix(right_axis, f"{self.name} sums over it without a weight that could be told to skip it")

    def declare(self, **sizes: Axis | tuple[Axis, ...]) -> None:
        """Attributes under which modules keep the sizes of these axes."""
        self.facts.sizes.extend((self.owner, name, axis) for name, axis in sizes.items())
