"""What a quantized tensor declares that it can do, read from the geometry of its layout alone.

Written against the definition of a geometry and not against the code that cuts: the suites compare
the two. A part that is itself quantized has to be able to do its share; a layout made for one kernel
can do what its canonical layout can, as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Geometry, PartAxis
from ao_core.tensor import QTensor

__all__ = [
    "can_cut",
    "can_gather",
    "can_join",
    "can_narrow",
    "can_resize",
    "can_select",
    "can_stack",
    "layouts_of",
]


def layouts_of(q: QTensor) -> set[str]:
    """The layouts of a tensor and of its quantized parts."""
    nested = [layouts_of(part) for part in q.parts.values() if isinstance(part, QTensor)]
    return {q.spec.layout, q.canonical().spec.layout}.union(*nested)


def can_narrow(q: QTensor, dim: int, start: int, length: int) -> bool:
    """Whether every part can be cut before element `start`."""
    q = q.canonical()
    axes = _axes(q, dim)
    if axes is None:
        return False
    inner = q.order[dim]
    for name, axis in axes:
        if axis is None:
            continue
        if start % axis.values and length:
            return False
        part = getattr(q, name)
        first = start // axis.values * axis.entries
        count = -(-length // axis.values) * axis.entries
        if isinstance(part, QTensor) and not can_narrow(part, inner, first, count):
            return False
    return True


def can_cut(q: QTensor, dim: int, sizes: Sequence[int]) -> bool:
    """Whether pieces of these sizes, one after the other, can be cut out."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return all(can_narrow(q, dim, start, n) for start, n in zip(starts, sizes, strict=True))


def can_select(q: QTensor, dim: int) -> bool:
    """Whether a single index has codes of its own: one entry, shared with no other index."""
    q = q.canonical()
    axes = _axes(q, dim)
    return (
        q.dim() > 1
        and axes is not None
        and all(_axes(q, other) is not None for other in range(q.dim()))
        and all(axis is None or axis.entries == 1 for _, axis in axes)
        and all(axis == PartAxis(1, 1) for name, axis in axes if name == "qdata")
        and all(can_select(part, q.order[dim]) for part in _quantized(q))
    )


def can_gather(q: QTensor) -> bool:
    """Whether rows of a tensor with further dimensions can be picked one by one."""
    q = q.canonical()
    axes = _axes(q, 0)
    if q.dim() < 2 or q.order[0] != 0 or axes is None or _axes(q, 1) is None:
        return False
    single = all(axis is None or axis.entries == 1 for _, axis in axes)
    return single and all(axis == PartAxis(1, 1) for name, axis in axes if name == "qdata")


def can_join(pieces: Sequence[QTensor], dim: int) -> bool:
    """Whether every piece but the last ends where the joined tensor may be cut.

    The pieces are taken to be equal in the parts that do not change along `dim`.
    """
    first = pieces[0].canonical()
    inner = first.order[dim]
    joined = list(first.stored_shape)
    joined[inner] = sum(piece.shape[dim] for piece in pieces)
    axes = _axes(first, dim, tuple(joined))
    if axes is None:
        return False
    if any(axis and piece.shape[dim] % axis.values for _, axis in axes for piece in pieces[:-1]):
        return False
    changing = [name for name, axis in axes if axis is not None]
    nested = [name for name in changing if isinstance(getattr(first, name), QTensor)]
    return all(can_join([getattr(p.canonical(), name) for p in pieces], inner) for name in nested)


def can_resize(q: QTensor, rows: int) -> bool:
    """Whether the sizes of all parts follow from those of the tensor if it had another number of rows."""
    q = q.canonical()
    if rows != q.shape[0]:
        return can_join([q], 0)
    try:
        q.layout_record.geometry(q.spec, q.stored_shape, q.format)
    except UnsupportedOp:
        return False
    return all(can_resize(part, part.shape[0]) for part in _quantized(q))


def can_stack(q: QTensor) -> bool:
    """Whether blocks and parts have the dimensions of the tensor, so that one can be put before."""
    q = q.canonical()
    shape = (2, *q.stored_shape)
    return (
        not q.is_permuted
        and q.layout_record.blocked_shape(shape) == shape
        and all(_axes(q, dim) is not None for dim in range(q.dim()))
        and all(can_stack(part) for part in _quantized(q))
    )


def _axes(
    q: QTensor, dim: int, shape: tuple[int, ...] | None = None
) -> list[tuple[str, PartAxis | None]] | None:
    """The axis of each part along an logical dimension; None if one cannot be cut there."""
    inner = q.order[dim]
    try:
        declared = q.layout_record.geometry(q.spec, shape or q.stored_shape, q.format)
    except UnsupportedOp:
        return None
    found: dict[str, Geometry] = {n: axes for n, axes in declared.items() if n in q.part_names}
    if any(inner >= len(axes) for axes in found.values()):
        return None
    return [(name, axes[inner]) for name, axes in found.items()]


def _quantized(q: QTensor) -> list[QTensor]:
    return [part for part in q.parts.values() if isinstance(part, QTensor)]
