"""What generation does to a cache besides appending: all of it on codes, none of it rounds anything."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core.ext import ConfigError
from ao_quant.kv_cache.config import BLOCK
from ao_quant.kv_cache.state import QuantizedKV, coded_tokens, tail_slots
from ao_quant.kv_cache.update import append_

__all__ = [
    "append",
    "crop_",
    "exact_like",
    "grown",
    "reorder_",
    "repeat",
    "reset_",
    "select",
    "widened",
]


def append(kv: QuantizedKV, key: Tensor, value: Tensor) -> QuantizedKV:
    """`append_`, into a larger cache where the tokens do not fit: twice as large, so that copies are rare.

    Args:
        kv: the cache, whose tensors are written.
        key: (B, Hkv, T, D) in the dtype of the cache.
        value: (B, Hkv, T, Dv), likewise.

    Returns:
        The cache to go on with: `kv`, or one with more memory.
    """
    total = kv.tokens + (key.shape[2] if key.dim() == 4 else 0)
    if total > kv.capacity:
        kv = grown(kv, max(total, 2 * kv.capacity))
    append_(kv, key, value)
    return kv


def crop_(kv: QuantizedKV, tokens: int) -> None:
    """Forget all but the first `tokens` tokens.

    Up to `window` tokens can be forgotten without a trace: what follows gets the codes that it would have got
    otherwise. More may cut through a quantized block; see `append_`.

    Raises:
        ConfigError: there are fewer tokens.
    """
    held, coded = kv.counts.tolist()
    if not 0 <= tokens <= held:
        raise ConfigError(
            f"tokens={tokens}: this cache holds {held}; use a number from 0 to {held}"
        )
    kv.counts.copy_(torch.tensor([tokens, min(coded, tokens)], device=kv.device))


def reset_(kv: QuantizedKV) -> None:
    """Forget all tokens; the memory stays."""
    kv.counts.zero_()


def grown(kv: QuantizedKV, capacity: int) -> QuantizedKV:
    """A cache with the same tokens and memory for `capacity` of them; `kv` itself if it has that."""
    if capacity <= kv.capacity:
        return kv
    old, size = kv.key.shape[2], coded_tokens(capacity, kv.window)
    size = max(size, old)
    size = -(-size // BLOCK) * BLOCK
    fixed = len(kv.tensors()) - len(kv.key.leaves) - len(kv.value.leaves)
    tensors = kv.tensors()
    for place, leaf in enumerate(tensors[fixed:], start=fixed):
        rows = leaf.shape[2]
        larger = leaf.new_zeros(
            *leaf.shape[:2], rows // (old // BLOCK) * (size // BLOCK), *leaf.shape[3:]
        )
        larger[:, :, :rows].copy_(leaf)
        tensors[place] = larger
    return kv.with_tensors(tensors, size)


def exact_like(kv: QuantizedKV, window: int) -> QuantizedKV:
    """An empty cache of the same rows, heads, dtype and device that keeps `window` tokens exact.

    Memory for blocks is that of `kv`, for layers that shall have none in use: appending more than
    `window` + 127 tokens to both would mix them up. The tail is not cleared, so the system gives it pages
    as tokens come.
    """
    tails = [
        x.new_empty(*x.shape[:2], tail_slots(window), x.shape[3])
        for x in (kv.tail_key, kv.tail_value)
    ]
    counts = kv.counts.new_zeros(2)
    return replace(kv, tail_key=tails[0], tail_value=tails[1], counts=counts, window=window)


def widened(kv: QuantizedKV, window: int) -> QuantizedKV:
    """A cache with the same tokens, of which at least the last `window` stay exact; `kv` if they do already.

    So a cache can grow whose tokens are all exact: with a window of all tokens, none is ever in a block.

    Raises:
        ConfigError: some tokens are quantized already, and cannot become exact again.
    """
    if window <= kv.window:
        return kv
    tokens, coded = kv.counts.tolist()
    if coded:
        raise ConfigError(
            f"window={window}: {coded} of {tokens} tokens are quantized already; make the cache with this "
            "window"
        )
    tails = []
    for tail in (kv.tail_key, kv.tail_value):
        larger = tail.new_empty(*tail.shape[:2], tail_slots(window), tail.shape[3])
        # without blocks there are fewer tokens than slots, so each is in the slot of its number
        larger[:, :, :tokens].copy_(tail[:, :, :tokens])
        tails.append(larger)
    return replace(kv, tail_key=tails[0], tail_value=tails[1], window=window)


def select(kv: QuantizedKV, rows: Tensor) -> QuantizedKV:
    """A cache of these rows of the batch, in this order; a row may be there several times.

    Args:
        kv: the cache, which stays as it is.
        rows: integers (N,), on any device.

    Raises:
        ConfigError: a row does not exist.
    """
    index = _checked(kv, rows)
    counts, *rest = kv.tensors()
    return kv.with_tensors([counts.clone(), *(x.index_select(0, index) for x in rest)])


def repeat(kv: QuantizedKV, times: int) -> QuantizedKV:
    """A cache in which each row of the batch is there `times` times, one after the other.

    Raises:
        ConfigError: `times` is not positive.
    """
    if times < 1:
        raise ConfigError(f"times={times}: use a positive number")
    return select(kv, torch.arange(kv.batch, device=kv.device).repeat_interleave(times))


def reorder_(kv: QuantizedKV, rows: Tensor) -> None:
    """Put these rows of the batch in the place of all rows, as beam search does.

    Args:
        kv: the cache, whose tensors are written.
        rows: integers (B,), on any device.

    Raises:
        ConfigError: they are not B, or a row does not exist.
    """
    index = _checked(kv, rows)
    if len(index) != kv.batch:
        raise ConfigError(
            f"rows: {len(index)} for a batch of {kv.batch}; use select() for another size"
        )
    tokens, coded = kv.counts.tolist()
    for tail in (kv.tail_key, kv.tail_value):
        used = tail[:, :, :tokens]  # all of it, once tokens have gone around
        used.copy_(used.index_select(0, index))
    for x in kv.tensors()[3:] if coded else ():
        x.copy_(x.index_select(0, index))


def _checked(kv: QuantizedKV, rows: Tensor) -> Tensor:
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ConfigError(f"rows is {rows.dtype} {tuple(rows.shape)}; use integers (N,)")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < kv.batch:
        raise ConfigError(f"rows={rows.tolist()}: the batch has rows 0 to {kv.batch - 1}")
    return rows.to(kv.device, torch.int64)
