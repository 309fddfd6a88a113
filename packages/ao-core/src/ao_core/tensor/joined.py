"""Weights of linear layers that read the same input, as one weight around the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ao_core.layouts import SHARED
from ao_core.tensor.cut import geometry
from ao_core.tensor.qtensor import QTensor

__all__ = ["cannot_join_rows", "join_rows", "share_rows"]


def cannot_join_rows(tensors: Sequence[QTensor]) -> str | None:
    """None, or why weights (N, K) cannot be one weight whose rows are theirs, one after the other."""
    first = tensors[0]
    for one in tensors:
        if one.is_permuted or one.dim() != 2:
            return "a weight is transposed or has not two dimensions"
        same = (first.spec, first.dtype, first.shape[1], first.device)
        if (one.spec, one.dtype, one.shape[1], one.device) != same:
            return f"the formats differ: {first.spec} and {one.spec}"
        if any(isinstance(part, QTensor) for part in one.parts.values()):
            return "scales are quantized themselves"
    if first.spec.input or (first.spec.act is not None and first.spec.act.is_static):
        return "each weight has input steps or static activations of its own"
    sizes = [_entries(one) for one in tensors]
    if any(size is None for size in sizes):
        return f"the layout {first.spec.layout!r} does not store whole rows one after the other"
    for one in tensors[:-1]:
        if one.shape[0] % _rows_apart(one):
            return f"{one.shape[0]} rows are no multiple of {_rows_apart(one)}, which are stored together"
    for name, size in (sizes[0] or {}).items():
        if size is None and not all(
            torch.equal(one.parts[name], first.parts[name]) for one in tensors
        ):
            return f"the parts {name!r} differ"
    return None


def join_rows(tensors: Sequence[QTensor]) -> QTensor:
    """One weight with the rows of all, in memory of its own.

    The weights must be some for which `cannot_join_rows` is None.
    """
    first = tensors[0]
    entries = _entries(first)
    assert entries is not None
    parts = {
        name: part if entries[name] is None else torch.cat([one.parts[name] for one in tensors])
        for name, part in first.parts.items()
    }
    rows = sum(one.shape[0] for one in tensors)
    return first.like(parts, (rows, first.shape[1]))


def share_rows(joined: QTensor, tensors: Sequence[QTensor]) -> None:
    """Let the weights that `joined` was made of use its memory. They stay the same objects."""
    places: dict[str, int] = {}
    for one in tensors:
        entries = _entries(one)
        assert entries is not None
        parts: dict[str, Tensor] = {}
        for name, part in joined.parts.items():
            size = entries[name]
            begin = places.get(name, 0)
            parts[name] = part if size is None else part[begin : begin + size]
            places[name] = begin + (size or 0)
        for name, part in parts.items():
            setattr(one, name, part)
        one._bound.clear()


def _rows_apart(tensor: QTensor) -> int:
    """Rows that are stored together, so that a weight can only end after a multiple of them."""
    return tensor.layout_record.row_block or tensor.spec.block[0]


def _entries(tensor: QTensor) -> dict[str, int | None] | None:
    """Entries of dimension 0 of each part that belong to the rows; of a part that is common to all, None.

    None where the layout does not store rows so.
    """
    layout = tensor.layout_record
    if layout.canonical:
        if tensor.spec.block[0] != 1:
            return None
        axes = geometry(tensor)
        common = {name for name in tensor.part_names if not axes[name] or axes[name][0] is SHARED}
    elif layout.row_block:
        common = set(layout.common)
    else:
        return None
    return {n: None if n in common else p.shape[0] for n, p in tensor.parts.items()}
