"""Slicing, joining and gathering parts, written once over the geometry that a layout declares.

A layout made for one kernel declares none: its tensors are cut in their canonical layout, as a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import SHARED, Geometry, PartAxis, Parts
from ao_core.spec import WHOLE, Spec
from ao_core.steps import LOW_RANK
from ao_core.tensor.beside import beside_axes
from ao_core.tensor.input_steps import cannot_cut, cannot_join, step_names
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import to_canonical, to_layout

__all__ = [
    "Origin",
    "block_of",
    "gather_rows",
    "geometry",
    "is_stacked",
    "join",
    "narrow",
    "owned",
    "part_size",
    "same_kind",
    "select",
    "stack",
    "view_of",
]


def geometry(
    tensor: QTensor, op: str = "shard", stored_shape: tuple[int, ...] | None = None
) -> dict[str, Geometry]:
    """The geometry of the tensor's parts, if it had another stored shape; `op` is for the error."""
    shape = tensor.stored_shape if stored_shape is None else stored_shape
    try:
        declared = tensor.layout_record.geometry(tensor.spec, shape, tensor.format)
    except UnsupportedOp as error:
        raise _refuse(op, tensor, str(error)) from error
    found = {name: axes for name, axes in declared.items() if name in tensor.part_names}
    return found | beside_axes(tensor.spec, shape)


def _refuse(op: str, tensor: QTensor, why: str) -> UnsupportedOp:
    return UnsupportedOp(f"{op} on layout {tensor.spec.layout!r} ({tensor.spec}): {why}")


def _axis(tensor: QTensor, axes: Geometry, name: str, dim: int, op: str) -> PartAxis | None:
    if dim >= len(axes):
        raise _refuse(op, tensor, f"its part {name!r} cannot be cut along dimension {dim}")
    return axes[dim]


def narrow(tensor: QTensor, dim: int, start: int, length: int) -> QTensor:
    """`length` elements from `start` along the logical dimension `dim`, as views of the parts."""
    whole, tensor = tensor, _cuttable(tensor, "slice")
    inner, size, end = tensor.order[dim], tensor.shape[dim], start + length
    if inner == tensor.dim() - 1 and length != size:
        _check_steps("slice", tensor, cannot_cut(tensor.spec, start, length))
    parts: Parts = {}
    borrowed: set[str] = set()
    for name, axes in geometry(tensor, "slice").items():
        part = getattr(tensor, name)
        axis = _axis(tensor, axes, name, inner, "slice")
        if axis is not SHARED:
            if start % axis.values and length:
                raise _refuse(
                    "slice",
                    tensor,
                    f"start={start} cuts through {axis.values} elements of {name!r}",
                )
            first = start // axis.values * axis.entries
            if end % axis.values and end != size:
                borrowed.add(name)
            entries = -(-length // axis.values) * axis.entries
            cut = narrow if isinstance(part, QTensor) else torch.narrow
            part = cut(part, inner, first, entries)
        elif length != size:
            borrowed.add(name)
        parts[name] = part
    shape = list(tensor.shape)
    shape[dim] = length
    piece = _lent(tensor.like(parts, tuple(shape), strides=tensor.stride()), borrowed)
    return _piece_of(piece, tensor, whole)


def _check_steps(op: str, tensor: QTensor, reason: str | None) -> None:
    if reason is not None:
        raise _refuse(op, tensor, f"{reason}; call .dequantize() first")


def select(tensor: QTensor, dim: int, index: int) -> QTensor:
    """One index along `dim`, which disappears from the shape and the block."""
    if tensor.spec.input and tensor.flat_from is None:
        inner, last = tensor.order[dim], tensor.dim() - 1
        of_rows = last > 1 or any(step.kind == LOW_RANK for step in tensor.spec.input)
        if inner == last or (inner == last - 1 and of_rows and step_names(tensor.spec)):
            _check_steps("select", tensor, "input steps are along the columns of matrices")
    if is_stacked(tensor) and tensor.order[dim] == 0:
        return _unstack(tensor, dim, index)
    whole, tensor = tensor, _cuttable(tensor, "select")
    borrowed: set[str] = set()
    inner, ndim = tensor.order[dim], tensor.dim()
    if ndim == 1:
        raise _refuse("select", tensor, "a single element has no block; call .dequantize() first")
    parts: Parts = {}
    for name, axes in geometry(tensor, "select").items():
        _axis(tensor, axes, name, ndim - 1, "select")  # the other dimensions keep theirs
        axis = axes[inner]
        if (axis is not SHARED and axis.entries != 1) or (
            name == "qdata" and axis != PartAxis(1, 1)
        ):
            raise _refuse("select", tensor, f"elements along dimension {dim} are packed together")
        entry = 0 if axis is SHARED else index // axis.values
        if (axis is SHARED or axis.values > 1) and tensor.shape[dim] > 1:
            borrowed.add(name)
        parts[name] = getattr(tensor, name).select(inner, entry)
    return _piece_of(_lent(_without(tensor, dim, parts), borrowed), tensor, whole)


def is_stacked(tensor: QTensor) -> bool:
    """Whether a layout of a kernel keeps the slices of a 3-D tensor apart; see `Layout.stacked`."""
    return tensor.layout_record.stacked and tensor.flat_from is None and tensor.dim() == 3


def _unstack(tensor: QTensor, dim: int, index: int) -> QTensor:
    parts = {name: part.select(0, index) for name, part in tensor.parts.items()}
    # blocks over several slices: each has a copy of what they share
    shared = block_of(tensor.spec, 3)[0] != 1
    piece = _lent(_without(tensor, dim, parts), set(parts) - {"qdata"} if shared else set())
    return view_of(tensor, piece)


def _without(tensor: QTensor, dim: int, parts: Parts) -> QTensor:
    """The tensor around parts that lack the dimension `dim`."""
    inner, ndim = tensor.order[dim], tensor.dim()
    block = block_of(tensor.spec, ndim)
    spec = replace(tensor.spec, block=block[:inner] + block[inner + 1 :])
    order = tuple(i - (i > inner) for i in tensor.order if i != inner)
    shape = tuple(s for d, s in enumerate(tensor.shape) if d != dim)
    strides = tuple(s for d, s in enumerate(tensor.stride()) if d != dim)
    return tensor.like(parts, shape, spec=spec, order=order, strides=strides)


@dataclass(frozen=True)
class Origin:
    """Where a slice of a layout that cannot be cut in place comes from.

    The slice views a canonical copy, into which it is written; the copy is then packed into the memory
    of the whole.
    """

    whole: QTensor
    canonical: QTensor

    def refresh(self) -> None:
        """Take what was written to the whole since the copy was made."""
        _refill(self.canonical, to_canonical(self.whole))

    def write_back(self) -> None:
        """Pack the copy into the memory of the whole."""
        _refill(self.whole, to_layout(self.canonical, self.whole.spec.layout))


def _refill(target: QTensor, source: QTensor) -> None:
    for (_, to), (_, leaf) in zip(target.leaves(), source.leaves(), strict=True):
        to.copy_(leaf)


def _piece_of(piece: QTensor, tensor: QTensor, whole: QTensor) -> QTensor:
    """A piece of `tensor`, which is `whole` in its canonical layout: itself, or a copy."""
    if tensor is whole:
        return view_of(whole, piece)
    piece._origin = Origin(whole, tensor)
    return piece


def view_of(tensor: QTensor, out: QTensor) -> QTensor:
    """`out`, which has the memory of `tensor`, and so its origin."""
    out._origin = tensor._origin
    return out


def owned(tensor: QTensor) -> QTensor:
    """A tensor with memory of its own."""
    tensor._borrowed, tensor._origin = frozenset(), None
    return tensor


def _lent(piece: QTensor, borrowed: set[str]) -> QTensor:
    """Mark the parts of a piece that cannot be written without changing, or missing, the rest."""
    piece._borrowed |= borrowed
    return piece


def join(tensors: Sequence[QTensor], dim: int) -> QTensor:
    """Concatenate along the logical dimension `dim`; all must have one format and aligned ends.

    Pieces that have one scale for all their rows keep it: blocks of the result end with the pieces.
    """
    tensors = [_cuttable(tensor, "cat") for tensor in tensors]
    _same_format(tensors, "cat")
    inner = tensors[0].order[dim]
    if len(tensors) > 1 and inner != tensors[0].dim() - 1:
        tensors = _with_own_blocks(tensors, dim)
    first = tensors[0]
    stored = list(first.stored_shape)
    stored[inner] = sum(t.shape[dim] for t in tensors)
    parts: Parts = {}
    # a block may extend further than the pieces, but not than what they become
    if inner == first.dim() - 1:
        _check_steps("cat", first, cannot_join(first.spec))
    for name, axes in geometry(first, "cat", tuple(stored)).items():
        pieces = [getattr(t, name) for t in tensors]
        axis = _axis(first, axes, name, inner, "cat")
        if axis is SHARED:
            if not all(torch.equal(pieces[0], p) for p in pieces[1:]):
                raise _refuse("cat", first, f"the pieces do not share one {name!r}")
            parts[name] = pieces[0].clone()  # the result may be written, and its pieces stay
            continue
        if any(t.shape[dim] % axis.values for t in tensors[:-1]):
            raise _refuse("cat", first, f"a piece ends inside {axis.values} elements of {name!r}")
        parts[name] = torch.cat(pieces, inner)
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    nested, spec = parts.get("scale"), first.spec
    if isinstance(nested, QTensor):  # whose blocks may have become smaller, too
        spec = replace(spec, scale_dtype=nested.spec)
    return owned(first.like(parts, tuple(shape), spec=spec))


def _with_own_blocks(tensors: Sequence[QTensor], dim: int) -> Sequence[QTensor]:
    """The pieces in blocks that end with them, where each has something that all its rows share."""
    first = tensors[0]
    inner, block = first.order[dim], list(block_of(first.spec, first.dim()))
    rows = math.gcd(*(tensor.shape[dim] for tensor in tensors))
    if block[inner] != WHOLE or not rows:
        return tensors
    block[inner] = rows
    spec = replace(first.spec, block=tuple(block))
    before = geometry(first, "cat")
    after = first.layout_record.geometry(spec, first.stored_shape, first.format)
    shared = [
        name
        for name, axes in before.items()
        if name in after and axes[inner] is SHARED and after[name][inner] is not SHARED
    ]
    if all(torch.equal(getattr(first, n), getattr(t, n)) for n in shared for t in tensors[1:]):
        return tensors  # they are pieces of one tensor
    return [_in_blocks(t, shared, inner, t.shape[dim] // rows, spec) for t in tensors]


def _in_blocks(
    tensor: QTensor, shared: Sequence[str], inner: int, blocks: int, spec: Spec
) -> QTensor:
    """The tensor with a copy of what its rows share for each of so many blocks of them."""
    copies = {name: torch.cat([getattr(tensor, name)] * blocks, inner) for name in shared}
    return tensor.like({**tensor.parts, **copies}, spec=spec)


def stack(tensors: Sequence[QTensor], dim: int) -> QTensor:
    """Stack along a new leading dimension, e.g. the weights of experts."""
    tensors = [_cuttable(tensor, "stack") for tensor in tensors]
    first = tensors[0]
    _same_format(tensors, "stack")
    ndim = first.dim()
    shape = (len(tensors), *first.shape)
    if ndim == 1:
        _check_steps(
            "stack", first, "rows have input steps of their own" if first.spec.input else None
        )
    if dim != 0 or first.is_permuted or first.layout_record.blocked_shape(shape) != shape:
        raise _refuse("stack", first, "only along dimension 0, and not transposed or flat")
    for name, axes in geometry(first, "stack").items():
        _axis(first, axes, name, ndim - 1, "stack")
    block = block_of(first.spec, ndim)
    parts = {n: torch.stack([getattr(t, n) for t in tensors]) for n in first.part_names}
    order = tuple(range(ndim + 1))
    return owned(first.like(parts, shape, spec=replace(first.spec, block=block), order=order))


def gather_rows(tensor: QTensor, index: Tensor) -> QTensor:
    """Rows of dimension 0 at a one-dimensional `index`: what an embedding lookup reads."""
    tensor = _cuttable(tensor, "index_select")
    if tensor.order[0] != 0:
        raise _refuse("index_select", tensor, "its rows are not stored together")
    parts: Parts = {}
    for name, axes in geometry(tensor, "index_select").items():
        axis = _axis(tensor, axes, name, 0, "index_select")
        part = getattr(tensor, name)
        if axis is SHARED:
            parts[name] = _plain(part)
        elif axis.entries != 1 or (name == "qdata" and axis.values != 1) or len(axes) < 2:
            raise _refuse("index_select", tensor, f"rows are packed together in {name!r}")
        else:
            rows = index if axis.values == 1 else index // axis.values
            parts[name] = _plain(part).index_select(0, rows)
    # each gathered row now has a scale of its own
    ndim = tensor.dim()
    block = block_of(tensor.spec, ndim)
    lead = block[0] if block[0] == WHOLE else 1
    nested = isinstance(tensor.spec.scale_dtype, Spec)
    scale_dtype = "float32" if nested else tensor.spec.scale_dtype
    named = len(tensor.spec.block) < ndim  # the leading extents of others are 1 as it is
    block = tensor.spec.block if named else (lead, *block[1:])
    spec = replace(tensor.spec, block=block, scale_dtype=scale_dtype)
    out = owned(tensor.like(parts, (index.shape[0], *tensor.shape[1:]), spec=spec))
    # what all rows share is not gathered, but the tensor's own
    return _lent(out, {name for name, part in parts.items() if part is getattr(tensor, name)})


def _plain(part: Tensor) -> Tensor:
    return part.dequantize(torch.float32) if isinstance(part, QTensor) else part


def part_size(tensor: QTensor, name: str, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The size of a part if the tensor had another stored shape."""
    axes = geometry(tensor, "new_zeros", stored_shape)[name]
    part, before = getattr(tensor, name), tensor.stored_shape
    dims = len(tensor.layout_record.blocked_shape(stored_shape))
    sizes = list(part.shape)
    for dim in range(min(part.dim(), dims)):
        # a flat part depends on all dimensions, any other one only on its own
        if before == stored_shape or (dims > 1 and before[dim] == stored_shape[dim]):
            continue
        axis = _axis(tensor, axes, name, dim, "new_zeros")
        if axis is not SHARED:
            sizes[dim] = -(-stored_shape[dim] // axis.values) * axis.entries
    # learned values have a dimension more than the tensor
    return tuple(sizes)


def _cuttable(tensor: QTensor, op: str) -> QTensor:
    if tensor.flat_from is not None:
        raise _refuse(op, tensor, "the tensor is viewed flat; view it in its own shape first")
    return to_canonical(tensor)


def _same_format(tensors: Sequence[QTensor], op: str) -> None:
    first = tensors[0]
    for other in tensors:
        if (other.spec, other.order, other.dtype) != (first.spec, first.order, first.dtype):
            raise _refuse(op, first, f"another piece has the format {other.spec}")


def same_kind(a: QTensor, b: QTensor) -> bool:
    """Whether two tensors have equal shape and format, so that parts correspond one to one."""
    return (a.spec, a.order, a.flat_from, a.shape) == (b.spec, b.order, b.flat_from, b.shape)


def block_of(spec: Spec, ndim: int) -> tuple[int, ...]:
    """The block with one extent for each of `ndim` dimensions."""
    return (1,) * (ndim - len(spec.block)) + spec.block[-ndim:]
