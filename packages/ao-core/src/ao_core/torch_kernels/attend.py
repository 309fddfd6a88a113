"""The reference of the op `attend`: one tile of tokens after the other, by online softmax.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import torch
from torch import Tensor

from ao_core.errors import ConfigError
from ao_core.numerics import full_block
from ao_core.tensor.attention import Attention
from ao_core.tensor.qtensor import QTensor

__all__ = ["attend"]

#: tokens that a tile has a multiple of, unless scales are of other blocks
_BLOCK = 128
#: elements of the keys and values of a tile, and of its logits, unless one block or query has more
_TILE, _LOGITS = 1 << 20, 1 << 21


def attend(
    q: Tensor,
    key: QTensor,
    value: QTensor,
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    sinks: Tensor | None,
    attention: Attention,
) -> Tensor:
    """`softmax(scale · q kᵀ) v`, computed in float32, or in float64 of float64 queries.

    Each tile is dequantized once. No temporary is larger than a tile, its logits, or the queries.
    """
    tokens, coded = counts.tolist()
    _check_counts(tokens, coded, key, tail_key)
    batch, heads, _, dim = key.shape
    queries, value_dim = q.shape[2], value.shape[3]
    if not batch * queries * q.shape[1] * value_dim:
        return q.new_empty(*q.shape[:3], value_dim)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // heads
    # (B, Hkv, T, G, D): a range of queries is contiguous, with all heads that read one of keys
    q_BHTGD = (
        q.to(wide).reshape(batch, heads, group, queries, dim).transpose(2, 3) * attention.scale
    )
    out = q_BHTGD.new_zeros(batch, heads, queries, group, value_dim)
    greatest = torch.full_like(out[..., :1], -torch.inf)
    total = torch.zeros_like(greatest)
    if sinks is not None:
        greatest = _sink_logits(sinks, heads, greatest)
        total = torch.ones_like(greatest)
    state = (greatest, total, out)
    places = torch.arange(tokens, device=q.device)
    first = max(int(start.amin()), 0) if start is not None else 0
    if attention.window:
        first = max(first, tokens - queries - attention.window + 1)
    block = lcm(_BLOCK, *(full_block(x.spec.block, x.shape)[2] for x in (key, value)))
    step = max(_TILE // (batch * heads * (dim + value_dim)) // block, 1) * block
    for begin, end, k, v in _tiles(
        first, tokens, coded, block, step, key, value, tail_key, tail_value, center, wide
    ):
        _fold(q_BHTGD, k, v, places[begin:end], state, start, attention, tokens)
    result = out / torch.where(total == 0, 1.0, total)
    return result.transpose(2, 3).reshape(*q.shape[:3], value_dim).to(q.dtype).contiguous()


def _check_counts(tokens: int, coded: int, key: QTensor, tail_key: Tensor | None) -> None:
    slots = 0 if tail_key is None else tail_key.shape[2]
    if not 0 <= coded <= min(tokens, key.shape[2]) or tokens - coded > slots:
        raise ConfigError(
            f"counts={[tokens, coded]}: of {tokens} tokens {coded} are quantized; there is memory for "
            f"{key.shape[2]} of those, and for {slots} others"
        )


def _sink_logits(sinks: Tensor, heads: int, like: Tensor) -> Tensor:
    per_group = sinks.to(like.dtype).reshape(1, heads, 1, -1, 1)
    return per_group.expand(like.shape).clone(memory_format=torch.contiguous_format)


def _tiles(
    first: int,
    tokens: int,
    coded: int,
    block: int,
    step: int,
    key: QTensor,
    value: QTensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    dtype: torch.dtype,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(first token, token after the last, keys, values) of each tile from token `first` on."""
    for begin in range(first // block * block, coded, step):
        end = min(begin + step, coded)
        stop = min(-(-end // block) * block, key.shape[2])  # tokens of a block may share a scale
        k, v = (
            x.narrow(2, begin, stop - begin).dequantize(torch.float32)[:, :, : end - begin]
            for x in (key, value)
        )
        yield begin, end, (k if center is None else k + center).to(dtype), v.to(dtype)
    if tail_key is None or tail_value is None:
        return
    for begin in range(max(coded, first), tokens, step):
        end = min(begin + step, tokens)
        slots = torch.arange(begin, end, device=tail_key.device) % tail_key.shape[2]
        k, v = (x.index_select(2, slots).to(dtype) for x in (tail_key, tail_value))
        yield begin, end, k, v


def _fold(
    q_BHTGD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    places: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    start: Tensor | None,
    attention: Attention,
    tokens: int,
) -> None:
    """Add a tile to the greatest logit, the sum of weights and the weighted values of each query."""
    batch, heads, queries, group, dim = q_BHTGD.shape
    chunk = max(_LOGITS // max(batch * heads * group * len(places), 1), 1)
    low, high = int(places[0]), int(places[-1])
    for at in range(0, queries, chunk):
        part = slice(at, min(at + chunk, queries))
        own = torch.arange(part.start, part.stop, device=places.device) + tokens - queries
        if attention.causal and tokens - queries + part.stop - 1 < low:
            continue  # all of them come before the tile
        if attention.window and tokens - queries + part.start - attention.window >= high:
            continue  # all of them are too far behind it
        q = q_BHTGD[:, :, part].reshape(batch, heads, -1, dim)
        logits = (q @ k_BHSD.transpose(-2, -1)).view(batch, heads, len(own), group, len(places))
        if attention.softcap:
            logits = attention.softcap * torch.tanh(logits / attention.softcap)
        hidden = _hidden(own, places, start, attention)
        if hidden is not None:
            logits = logits.masked_fill(hidden, -torch.inf)
        greatest, total, out = (x[:, :, part] for x in state)
        highest = torch.maximum(greatest, logits.amax(-1, keepdim=True))
        base = torch.where(highest == -torch.inf, 0.0, highest)
        weights, kept = torch.exp(logits - base), torch.exp(greatest - base)
        added = weights.view(batch, heads, -1, len(places)) @ v_BHSD
        out.mul_(kept).add_(added.view(out.shape))
        total.mul_(kept).add_(weights.sum(-1, keepdim=True))
        greatest.copy_(highest)


def _hidden(
    own: Tensor, places: Tensor, start: Tensor | None, attention: Attention
) -> Tensor | None:
    """Which tokens of a tile a query does not see: broadcasts to (B, Hkv, T, G, S); None: it sees all."""
    hidden: Tensor | None = None
    if attention.causal:
        behind = own[:, None] - places
        out_of_sight = behind < 0
        if attention.window:
            out_of_sight = out_of_sight | (behind >= attention.window)
        hidden = out_of_sight[None, None, :, None]
    if start is not None:
        before = (places < start[:, None])[:, None, None, None]
        hidden = before if hidden is None else hidden | before
    return hidden
