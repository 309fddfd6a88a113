"""The scales that tensors carry, and what they have to be for a model to compute the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from ao_core.graph.labels import Labels, compact

__all__ = ["NONE", "Scaling", "Value"]


@dataclass(frozen=True)
class Value:
    """The logarithm of a tensor's scale: the sum of labels, each of which can be broadcast to its shape."""

    terms: tuple[Tensor, ...] = ()
    #: the parameter that this is, but for casts, and the number that was added to it
    parameter: tuple[str, float] | None = None


NONE = Value()


@dataclass
class Scaling:
    """What is known of scales while the calls of a model are visited one after the other."""

    labels: Labels
    values: dict[fx.Node, Value | list[Value]] = field(default_factory=dict)
    #: parameter -> the numbers that are added to it where it is used
    offsets: dict[str, set[float]] = field(default_factory=dict)
    #: labels of weights that products sum over
    readers: list[Tensor] = field(default_factory=list)

    def alive(self, value: Value) -> Value:
        """Without terms that were found to be 0."""
        terms = tuple(t for t in value.terms if bool(self.labels.find(t).any()))
        return value if len(terms) == len(value.terms) else replace(value, terms=terms)

    def block(self, *values: Value) -> None:
        """These tensors cannot be scaled."""
        for value in values:
            for term in value.terms:
                self.labels.zero_point(term)

    def constant(self, term: Tensor, dims: Iterable[int]) -> Tensor:
        """A term that cannot vary along some dimensions."""
        for dim in dims:
            if term.shape[dim] > 1:
                first = term.narrow(dim, 0, 1)
                self.labels.unify(term, first)
                term = first
        return term

    def single(self, value: Value, ndim: int) -> Tensor:
        """The only term of a value, with that many dimensions; others are made 1."""
        value = self.alive(value)
        for term in value.terms[1:]:
            self.labels.zero_point(term)
        return (
            _front(value.terms[0], ndim)
            if value.terms
            else torch.zeros([1] * ndim, dtype=torch.int64)
        )

    def equal(self, ndim: int, *values: Value) -> Value:
        """Several tensors that are broadcast against each other have the same scale."""
        alive = [self.alive(value) for value in values]
        if any(len(value.terms) > 1 for value in alive):
            return self._equal_by_pattern(ndim, alive)
        found = self.single(alive[0], ndim)
        for value in alive[1:]:
            other = self.single(value, ndim)
            self.labels.unify(found, other)
            found = torch.broadcast_tensors(found, other)[0]
        return self.alive(Value((compact(found),)))

    def _equal_by_pattern(self, ndim: int, values: Sequence[Value]) -> Value:
        """Terms that vary along the same dimensions are equal; those that have no partner are 1."""
        tables: list[dict[tuple[bool, ...], Tensor]] = []
        for value in values:
            table: dict[tuple[bool, ...], Tensor] = {}
            for term in (_front(t, ndim) for t in value.terms):
                pattern = tuple(size > 1 for size in term.shape)
                if pattern in table:
                    self.labels.zero_point(term)
                else:
                    table[pattern] = term
            tables.append(table)
        shared = set(tables[0]).intersection(*tables[1:])
        for table in tables:
            for pattern, term in table.items():
                if pattern in shared:
                    self.labels.unify(tables[0][pattern], term)
                else:
                    self.labels.zero_point(term)
        return self.alive(Value(tuple(tables[0][pattern] for pattern in sorted(shared))))

    def contract(self, a: Value, b: Value, ndim: int, *, reads: bool) -> Value:
        """The product (…, M, K) × (…, K, N): scales along K cancel, others go on.

        Args:
            a: scale of the left operand.
            b: scale of the right operand.
            ndim: dimensions of the product; both operands are seen with as many.
            reads: the right operand is made of parameters, which read what the left one has.
        """
        left, right = ([_front(t, ndim) for t in self.alive(value).terms] for value in (a, b))
        inner = [
            self._one([t for t in terms if t.shape[dim] > 1], across, ndim)
            for terms, dim, across in ((left, -1, -2), (right, -2, -1))
        ]
        if reads:
            self.readers.append(inner[1])
        self.labels.unify(inner[0], -inner[1].transpose(-1, -2))
        rest = [t for t in left if t.shape[-1] == 1] + [t for t in right if t.shape[-2] == 1]
        return Value(tuple(rest))

    def _one(self, terms: Sequence[Tensor], across: int, ndim: int) -> Tensor:
        """Only one term along the dimension that is summed over, the same for all rows (columns)."""
        for term in terms[1:]:
            self.labels.zero_point(term)
        if not terms:
            return torch.zeros([1] * ndim, dtype=torch.int64)
        return self.constant(terms[0], [across])


def _front(term: Tensor, ndim: int) -> Tensor:
    """With dimensions of size 1 in front."""
    return term.reshape([1] * (ndim - term.ndim) + list(term.shape))
