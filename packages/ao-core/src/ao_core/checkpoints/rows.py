"""Quantizing a large weight some rows at a time, so that what an algorithm needs beside it stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ao_core.errors import AoError
from ao_core.records import Skip
from ao_core.tensor import QTensor, cut
from ao_core.tensor.activations import act_names
from ao_core.tensor.input_steps import step_names

__all__ = ["ELEMENTS", "by_rows"]

#: elements that are quantized at a time
ELEMENTS = 1 << 22
#: rows at a time are a multiple of this: blocks over several rows have such extents
_ROWS = 128


def by_rows(
    dense: Tensor,
    apply: Callable[[Tensor], Tensor | Skip],
    elements: int = ELEMENTS,
    of_matrix: Callable[[int, Tensor], Tensor | Skip] | None = None,
) -> Tensor | Skip:
    """What `apply` makes of a matrix or of the 3-D weights of experts, by some of its rows at a time.

    Rows of one matrix of several go to `of_matrix`, with its number, where that is given.

    Where the format has something that all rows share, such as one scale of the tensor, `apply` gets all
    of them at once; and so it does where that would give another format.
    """
    pieces = list(_pieces(tuple(dense.shape), elements))
    if dense.is_meta or len(pieces) < 2:
        return apply(dense)

    def applied(piece: _Piece) -> Tensor | Skip:
        rows = _cut(dense, piece)
        if of_matrix is None or dense.dim() != 3:
            return apply(rows)
        return of_matrix(piece[0][0], rows)

    first = applied(pieces[0])
    if not isinstance(first, QTensor) or not _divides(first, tuple(dense.shape)):
        return apply(dense)
    if _differs(dense, first, apply):
        return apply(dense)
    whole = first.new_empty(tuple(dense.shape))
    assert isinstance(whole, QTensor)
    _put(whole, pieces[0], first)
    for piece in pieces[1:]:
        new = applied(piece)
        if not isinstance(new, QTensor) or new.spec != whole.spec:
            return apply(dense)
        _put(whole, piece, new)
    return whole


#: (start, length) along each dimension but the last
_Piece = tuple[tuple[int, int], ...]


def _pieces(shape: tuple[int, ...], elements: int) -> Iterator[_Piece]:
    """Consecutive rows of a matrix, or of one matrix of a stack at a time."""
    if len(shape) not in (2, 3) or shape[-1] == 0:
        return
    rows, row = shape[-2], shape[-1]
    step = max(elements // (row * _ROWS), 1) * _ROWS
    for index in range(shape[0] if len(shape) == 3 else 1):
        for start in range(0, rows, step):
            piece = (start, min(step, rows - start))
            yield (piece,) if len(shape) == 2 else ((index, 1), piece)


def _cut(tensor: Tensor, piece: _Piece) -> Tensor:
    for dim, (start, length) in enumerate(piece):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _put(whole: QTensor, piece: _Piece, new: QTensor) -> None:
    place = _cut(whole, piece)
    assert isinstance(place, QTensor)
    for (_, to), (_, leaf) in zip(place.leaves(), new.leaves(), strict=True):
        to.copy_(leaf)


def _divides(piece: QTensor, shape: tuple[int, ...]) -> bool:
    """Whether the parts of a tensor of `shape` are those of pieces like this one, side by side."""
    if piece.is_permuted or not piece.layout_record.canonical:
        return False
    if step_names(piece.spec):  # may follow from the rows that were seen
        return False
    try:
        axes_of = cut.geometry(piece, stored_shape=shape)
        for name, axes in axes_of.items():
            if name in act_names(piece.spec):  # the same in every piece
                continue
            for dim, size in enumerate(piece.stored_shape[:-1]):
                axis = axes[dim] if dim < len(axes) else None
                if axis is None or size % axis.values:
                    return False
            part = getattr(piece, name)
            if isinstance(part, QTensor) and not _divides(part, cut.part_size(piece, name, shape)):
                return False
    except AoError:
        return False
    return axes_of.keys() == piece.parts.keys()


def _differs(dense: Tensor, piece: QTensor, apply: Callable[[Tensor], Tensor | Skip]) -> bool:
    """Whether the whole would get another format than a piece of it; an algorithm may not know."""
    try:
        new = apply(torch.empty_like(dense, device="meta"))
    except Exception:  # a plugin's, from values that are not there: it may be of any kind
        return False
    return not isinstance(new, QTensor) or new.spec != piece.spec
