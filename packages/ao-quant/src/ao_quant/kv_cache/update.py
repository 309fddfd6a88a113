"""Tokens are appended to a `QuantizedKV`: each block is quantized once, from exact values."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext import ConfigError, quantize_values
from ao_core.ext.kernels import write_tail
from ao_quant.kv_cache.config import BLOCK
from ao_quant.kv_cache.state import QuantizedKV, coded_tokens

__all__ = ["append_", "append_now"]

#: tokens that are encoded at once, so that temporaries do not grow with a prompt
_SLAB = 16 * BLOCK


def append_(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    """Write the keys and values of the next T tokens, and quantize the blocks that become due.

    Which codes a token gets does not depend on how tokens are divided among calls. A block is quantized when
    `window` tokens follow it, all at once, from exact values. Of a block that `crop_` cut through, the
    tokens before the cut keep their codes, and the others share scales with them where tokens share scales.

    Args:
        kv: the cache, whose tensors are written.
        key: (B, Hkv, T, D) in the dtype of the cache.
        value: (B, Hkv, T, Dv), likewise.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit, or there is no memory for so many tokens; the cache
            is as it was.
    """
    if torch.compiler.is_compiling():
        from ao_quant.kv_cache.traced import append_traced

        append_traced(kv, key, value)
    else:
        append_now(kv, key, value)


def append_now(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    """`append_` outside of a trace."""
    _check(kv, key, value)
    tokens, coded = kv.counts.tolist()
    total = tokens + key.shape[2]
    if total > kv.capacity:
        raise ConfigError(
            f"{key.shape[2]} tokens after {tokens} are {total}, and this cache has memory for "
            f"{kv.capacity}; make it with capacity={total} or more, or take grown(kv, {total})"
        )
    due = max(coded_tokens(total, kv.window), coded)
    if due > coded:
        with torch.no_grad():
            _encode_due(kv, key, value, tokens, coded, due)
    write_tail(kv.counts, kv.tail_key, kv.tail_value, key, value, due)


def _encode_due(
    kv: QuantizedKV, key: Tensor, value: Tensor, tokens: int, coded: int, due: int
) -> None:
    """Quantize the tokens from `coded` on that are in blocks when `due` tokens are."""
    if coded == 0 and kv.center is not None:
        first = _rows(kv.tail_key, key, tokens, 0, BLOCK).float().contiguous()
        kv.center.copy_(first.mean(2, keepdim=True))
    for begin, end in _slabs(coded, due):
        for stored, tail, new, center in (
            (kv.key, kv.tail_key, key, kv.center),
            (kv.value, kv.tail_value, value, None),
        ):
            rows = _rows(tail, new, tokens, begin, end)
            _encode(stored.tensor(), rows if center is None else rows.float() - center, begin)


def _check(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    tokens = key.shape[2] if key.dim() == 4 else -1
    for name, x, stored in (("key", key, kv.key), ("value", value, kv.value)):
        batch, heads, _, width = stored.shape
        if tuple(x.shape) != (batch, heads, tokens, width):
            raise ConfigError(
                f"{name} has the shape {tuple(x.shape)}; this cache takes ({batch}, {heads}, T, {width}): "
                f"a batch of {batch}, {heads} heads and the same T for keys and values"
            )
        if x.dtype != kv.dtype or x.device != kv.device:
            raise ConfigError(
                f"{name} is {x.dtype} on {x.device}, and this cache is {kv.dtype} on {kv.device}; cast or "
                "move it, or make another cache"
            )


def _slabs(coded: int, due: int) -> list[tuple[int, int]]:
    """Ranges of tokens to encode; none goes over the end of a block that was begun before."""
    if due <= coded:
        return []
    first = min(-(-coded // BLOCK) * BLOCK, due)
    begun = [(coded, first)] if first > coded else []
    return begun + [(at, min(at + _SLAB, due)) for at in range(first, due, _SLAB)]


def _rows(tail: Tensor, new: Tensor, tokens: int, begin: int, end: int) -> Tensor:
    """The exact values of tokens: those from `tokens` on are in `new`, those before in the tail."""
    if begin >= tokens:
        return new[:, :, begin - tokens : end - tokens]
    slots = torch.arange(begin, min(end, tokens), device=tail.device) % tail.shape[2]
    old = tail.index_select(2, slots)
    return old if end <= tokens else torch.cat([old, new[:, :, : end - tokens]], 2)


def _encode(stored: QTensor, rows: Tensor, begin: int) -> None:
    """Write the codes of tokens from `begin` on: of whole blocks, or of the rest of one."""
    shared = max((1, *stored.spec.block)[-2], 1)
    kept = begin % shared
    if kept:
        rest = min(shared - kept, rows.shape[2])
        _encode_by_scales_of(_tokens(stored, begin - kept, shared), rows[:, :, :rest], kept)
        begin, rows = begin + rest, rows[:, :, rest:]
    if rows.shape[2]:
        made = quantize_values(rows.contiguous(), stored.spec)
        place = _tokens(stored, begin, rows.shape[2])
        for (_, to), (_, leaf) in zip(place.leaves(), made.leaves(), strict=True):
            to.copy_(leaf)


def _tokens(stored: QTensor, begin: int, count: int) -> QTensor:
    """Tokens of a cache, in its memory."""
    return cast("QTensor", stored.narrow(2, begin, count))


def _encode_by_scales_of(block: QTensor, rows: Tensor, kept: int) -> None:
    """Write the tokens after those that keep their codes and scales."""
    before = rows.new_zeros(*rows.shape[:2], kept, rows.shape[3])
    parts = block.parts
    made = quantize_values(
        torch.cat([before, rows], 2),
        block.spec,
        scale=parts.get("scale"),
        zero_point=parts.get("zero_point"),
    )
    block.qdata[:, :, kept:].copy_(made.qdata[:, :, kept:])
