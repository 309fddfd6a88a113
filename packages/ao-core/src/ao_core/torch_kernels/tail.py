"""The references of the ops `write_tail` and `encode_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from ao_core.tensor.create import quantize_values
from ao_core.tensor.qtensor import QTensor

__all__ = ["encode_tokens", "write_tail"]

#: tokens that are encoded at once, so that temporaries do not grow with a prompt
_SLAB = 2048


def write_tail(
    counts: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    coded: int,
) -> None:
    """Rows of tokens are copied to their slots, without gradients."""
    before, held = counts.tolist()
    tokens, coded = before + key.shape[2], max(coded, held)
    first = max(before, coded)
    with torch.no_grad():
        slots = torch.arange(first, tokens, device=key.device) % tail_key.shape[2]
        tail_key.index_copy_(2, slots, key[:, :, first - before :])
        tail_value.index_copy_(2, slots, value[:, :, first - before :])
        counts.copy_(torch.tensor([tokens, coded], device=counts.device))


def encode_tokens(
    stored_key: QTensor,
    stored_value: QTensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    center: Tensor | None,
    tokens: int,
    begin: int,
    end: int,
) -> None:
    """A slab of tokens at a time is quantized as any tensor is, and copied to its place."""
    for stored, tail, new, offset in (
        (stored_key, tail_key, key, center),
        (stored_value, tail_value, value, None),
    ):
        shared = max((1, *stored.spec.block)[-2], 1)
        for first, last in _slabs(begin, end, shared):
            rows = _rows(tail, new, tokens, first, last)
            _encode(stored, rows if offset is None else rows.float() - offset, first, shared)


def _slabs(begin: int, end: int, shared: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens; none goes over the end of a block that was begun before."""
    whole = min(-(-begin // shared) * shared, end)
    if whole > begin:
        yield begin, whole
    for at in range(whole, end, _SLAB):
        yield at, min(at + _SLAB, end)


def _rows(tail: Tensor, new: Tensor, tokens: int, begin: int, end: int) -> Tensor:
    """The exact values of tokens: those from `tokens` on are in `new`, those before in the tail."""
    if begin >= tokens:
        return new[:, :, begin - tokens : end - tokens]
    slots = torch.arange(begin, min(end, tokens), device=tail.device) % tail.shape[2]
    old = tail.index_select(2, slots)
    return old if end <= tokens else torch.cat([old, new[:, :, : end - tokens]], 2)


def _encode(stored: QTensor, rows: Tensor, begin: int, shared: int) -> None:
    """Write the codes of tokens from `begin` on: of whole blocks, or of the rest of one."""
    kept = begin % shared
    if kept:
        return _encode_by_scales_of(_tokens(stored, begin - kept, shared), rows, kept)
    made = _quantized(rows.contiguous(), stored)
    place = _tokens(stored, begin, rows.shape[2])
    for (_, to), (_, leaf) in zip(place.leaves(), made.leaves(), strict=True):
        to.copy_(leaf)
    return None


def _quantized(rows: Tensor, stored: QTensor, **qparams: Any) -> QTensor:
    """Rows in the format of a tensor, after its input steps."""
    steps: dict[str, Any] = {name: stored.parts.get(name) for name in ("in_perm", "in_scale")}
    return quantize_values(rows, stored.spec, **steps, **qparams)


def _tokens(stored: QTensor, begin: int, count: int) -> QTensor:
    """Tokens of a cache, in its memory."""
    return cast("QTensor", stored.narrow(2, begin, count))


def _encode_by_scales_of(block: QTensor, rows: Tensor, kept: int) -> None:
    """Write the tokens after those that keep their codes and scales."""
    before = rows.new_zeros(*rows.shape[:2], kept, rows.shape[3])
    parts = block.parts
    made = _quantized(
        torch.cat([before, rows], 2),
        block,
        scale=parts.get("scale"),
        zero_point=parts.get("zero_point"),
    )
    block.qdata[:, :, kept : kept + rows.shape[2]].copy_(made.qdata[:, :, kept:])
