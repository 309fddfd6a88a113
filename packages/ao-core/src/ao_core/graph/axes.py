"""Dimensions of tensors as unknowns: which of them have to be the same, and how they are made of others.

A dimension that a `view` splits is a product of smaller ones, one that `cat` made is a sum. Operations say
which dimensions are the same (`unify`), as the type inference of a compiler does with types. What remains
without structure is an atom: its indices can go one by one, everywhere at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

__all__ = [
    "Axis",
    "among",
    "atoms",
    "coordinates",
    "factor",
    "find",
    "fix",
    "join",
    "product",
    "segment",
    "unify",
]


@dataclass(eq=False)
class Axis:
    """A dimension. Without `factors` and `segments` it is an atom."""

    #: how many indices it has
    size: int
    #: the dimensions it is the product of, outermost first
    factors: tuple[Axis, ...] = ()
    #: the dimensions it consists of, one behind the other
    segments: tuple[Axis, ...] = ()
    #: the dimension that this was found to be
    same: Axis | None = None
    #: why none of its indices can go (atoms only)
    fixed: str | None = None
    #: why the values of the others change when one goes (atoms only)
    inexact: str | None = None


def find(axis: Axis) -> Axis:
    """What an axis was found to be."""
    while axis.same is not None:
        if axis.same.same is not None:
            axis.same = axis.same.same  # the way gets shorter each time
        axis = axis.same
    return axis


def atoms(axis: Axis) -> list[Axis]:
    """The atoms of an axis, in order; one may be there several times."""
    axis = find(axis)
    parts = axis.factors or axis.segments
    return [atom for part in parts for atom in atoms(part)] if parts else [axis]


def fix(axis: Axis, reason: str, *, inexact: bool = False) -> None:
    """Note that nothing of an axis can go, or (`inexact`) not without changing the values of what stays.

    Args:
        axis: all of its atoms are meant.
        reason: the sentence for the report; a reason that is there already stays.
        inexact: it can go, and the values change.
    """
    for atom in atoms(axis):
        if inexact:
            atom.inexact = atom.inexact or reason
        else:
            atom.fixed = atom.fixed or reason


def product(factors: Iterable[Axis]) -> Axis:
    """The axis whose index runs over all factors, the last one fastest."""
    found = tuple(axis for axis in factors if axis.size != 1)
    if len(found) == 1:
        return found[0]
    return Axis(prod(axis.size for axis in found), factors=found)


def join(segments: Iterable[Axis]) -> Axis:
    """The axis that has some axes one behind the other."""
    found = tuple(axis for axis in segments if axis.size)
    if len(found) == 1:
        return found[0]
    return Axis(sum(axis.size for axis in found), segments=found)


def unify(a: Axis, b: Axis) -> None:
    """Two axes are the same; where their structures cannot be, nothing of them can go."""
    a, b = find(a), find(b)
    if b.factors == b.segments == ():
        a, b = b, a
    if a is b:
        return
    if a.factors == a.segments == () and a.size == b.size and a not in atoms(b):
        a.same = b
        if a.fixed:
            fix(b, a.fixed)
        if a.inexact:
            fix(b, a.inexact, inexact=True)
        return
    pairs = _matched(a, b) or _matched(b, a)
    for one, other in pairs:
        unify(one, other)
    if not pairs:
        for axis in (a, b):
            fix(axis, f"two uses divide its {axis.size} indices in ways that do not match")


def _matched(a: Axis, b: Axis) -> list[tuple[Axis, Axis]]:
    """The parts of `a`, and those of `b` that they have to be; empty where that is not possible."""
    divide, parts = (factor, a.factors) if a.factors else (segment, a.segments)
    if a.size != b.size or not parts:
        return []
    return list(zip(parts, divide(b, [part.size for part in parts]) or (), strict=False))


def factor(axis: Axis, sizes: Sequence[int]) -> list[Axis] | None:
    """The axes of these sizes that an axis is the product of; None where it cannot be."""
    axis = find(axis)
    wanted = [size for size in sizes if size != 1]
    if prod(sizes) != axis.size:
        return None
    if len(wanted) < 2:
        found: list[Axis] | None = [axis] if wanted else []
    elif axis.segments:
        found = _factor_segments(axis.segments, wanted)
    elif axis.factors:
        found = _factor_factors(axis.factors, wanted)
    else:
        axis.factors = tuple(_part(axis, size) for size in wanted)
        found = list(axis.factors)
    if found is None:
        return None
    rest = iter(found)
    return [Axis(1) if size == 1 else next(rest) for size in sizes]


def _part(axis: Axis, size: int) -> Axis:
    return Axis(size, fixed=axis.fixed, inexact=axis.inexact)


def _factor_segments(segments: tuple[Axis, ...], sizes: Sequence[int]) -> list[Axis] | None:
    """Each segment is some of the outermost factor times all of the inner ones."""
    inner = prod(sizes[1:])
    outermost: list[Axis] = []
    shared: list[Axis] | None = None
    for part in segments:
        found = factor(part, [part.size // inner, *sizes[1:]])
        if found is None:
            return None
        outermost.append(found[0])
        shared = shared or found[1:]
        for one, other in zip(shared, found[1:], strict=True):
            unify(one, other)
    return [join(outermost), *(shared or [])]


def _factor_factors(factors: tuple[Axis, ...], sizes: Sequence[int]) -> list[Axis] | None:
    """Take factors from the left, and divide the one in which a size ends."""
    queue, found = list(factors), []
    for size in sizes:
        taken: list[Axis] = []
        while size > 1:
            head = queue.pop(0)
            if size % head.size == 0:
                taken.append(head)
                size //= head.size
                continue
            pieces = factor(head, [size, head.size // size])
            if pieces is None:
                return None
            taken.append(pieces[0])
            queue.insert(0, pieces[1])
            size = 1
        found.append(product(taken))
    return found


def segment(axis: Axis, sizes: Sequence[int]) -> list[Axis] | None:
    """The axes of these sizes that an axis consists of; None where it cannot be divided there."""
    axis = find(axis)
    wanted = [size for size in sizes if size]
    if sum(sizes) != axis.size:
        return None
    if len(wanted) < 2:
        found: list[Axis] | None = [axis] if wanted else []
    elif axis.factors:
        outer, *rest = axis.factors
        inner = prod(part.size for part in rest)
        divisible = all(size % inner == 0 for size in wanted)
        pieces = segment(outer, [size // inner for size in wanted]) if divisible else None
        found = None if pieces is None else [product([piece, *rest]) for piece in pieces]
    elif axis.segments:
        found = _segment_segments(axis.segments, wanted)
    else:
        axis.segments = tuple(_part(axis, size) for size in wanted)
        found = list(axis.segments)
    if found is None:
        return None
    rest_ = iter(found)
    return [next(rest_) if size else Axis(0) for size in sizes]


def _segment_segments(segments: tuple[Axis, ...], sizes: Sequence[int]) -> list[Axis] | None:
    queue, found = list(segments), []
    for size in sizes:
        taken: list[Axis] = []
        while size:
            head = queue.pop(0)
            if head.size > size:
                pieces = segment(head, [size, head.size - size])
                if pieces is None:
                    return None
                head, rest = pieces
                queue.insert(0, rest)
            taken.append(head)
            size -= head.size
        found.append(join(taken))
    return found


def among(index: Tensor, chosen: Tensor) -> Tensor:
    """True where an index (-1: none) is one of those that are chosen."""
    return (index >= 0) & chosen[index]


def coordinates(axis: Axis) -> list[tuple[Axis, Tensor]]:
    """Each atom of an axis with, for every index of the axis, the index of the atom (-1: none)."""
    axis = find(axis)
    found: list[tuple[Axis, Tensor]] = []
    if axis.factors:
        outer, inner = 1, axis.size
        for part in axis.factors:
            inner //= part.size
            for atom, index in coordinates(part):
                found.append((atom, index.repeat_interleave(inner).repeat(outer)))
            outer *= part.size
    elif axis.segments:
        start = 0
        for part in axis.segments:
            for atom, index in coordinates(part):
                spread = torch.full((axis.size,), -1)
                spread[start : start + part.size] = index
                found.append((atom, spread))
            start += part.size
    else:
        found.append((axis, torch.arange(axis.size)))
    return found
