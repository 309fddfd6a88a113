"""The attention "ao_kv": over a cache of ours by the op `attend`, over other keys as transformers does it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ao_core.ext import ConfigError
from ao_hf.cache.masks import bounds_of, visible
from ao_hf.cache.stored import Stored

__all__ = ["UNREAD", "attending", "attention"]

#: what models pass besides, and no attention reads
UNREAD = frozenset({
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx",
    "num_items_in_batch", "position_ids", "position_embeddings", "hidden_states", "query", "key", "value",
    "deterministic", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache",
    "return_dict", "cache_position", "logits_to_keep", "is_first_iteration", "token_type_ids",
    "mm_token_type_ids",
})  # fmt: skip
#: what "sdpa" reads besides
_OF_SDPA = frozenset({"position_bias", "cache", "sliding_window"})


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """A time in which a model of transformers has the attention of that name; as it was afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Stored,
    value: Tensor | Stored,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for each layer; arguments are those of each `AttentionInterface`.

    Keys and values of an `AoCache` are read as they are stored, unless the model asks for something that
    `attend` does not have: dropout, a bias for each position, a mask that is not from a start to a stop. Then
    they are dequantized.

    Returns:
        (B, T, Hq, Dv), and None or what the attention of the model returns.
    """
    rest = {name: x for name, x in kwargs.items() if x is not None and name not in UNREAD}
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if isinstance(key, Stored) and isinstance(value, Stored) and not dropout:
        out = _attend(query, key, value, attention_mask, scaling, is_causal, rest)
        if out is not None:
            return out.transpose(1, 2), None
    key, value = (x.dense() if isinstance(x, Stored) else x for x in (key, value))
    return _dense(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, {**kwargs, **rest}
    )


def _attend(
    query: Tensor,
    key: Stored,
    value: Stored,
    attention_mask: Any,
    scaling: float | None,
    is_causal: bool,
    rest: dict[str, Any],
) -> Tensor | None:
    """The result by the op `attend`; None if it cannot do what is asked."""
    if value.kv is not key.kv or (key.part, value.part) != (0, 1):
        return None
    options = dict(rest)
    sinks, softcap = options.pop("s_aux", None), options.pop("softcap", None)
    window = options.pop("sliding_window", None)
    bounds = bounds_of(attention_mask)
    if options or (attention_mask is not None and bounds is None):
        return None
    causal = is_causal if bounds is None else bounds.causal
    if window and not causal:
        return None
    if key.layer.trial is not None:
        key.kv = value.kv = key.layer.checked(query, scaling)
    dtype = key.kv.dtype
    out: Tensor = key.layer.functions.attend_to(
        key.kv,
        query if query.dtype == dtype else query.to(dtype),
        start=None if bounds is None else bounds.start,
        stop=None if bounds is None else bounds.stop,
        sinks=sinks,
        scale=scaling,
        causal=causal,
        window=window or 0,
        softcap=softcap or 0.0,
    )
    return out


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention over dense keys: "sdpa", or the "eager" of the model where that cannot do what is asked."""
    bounds = bounds_of(attention_mask)
    queries, tokens = query.shape[2], key.shape[2]
    if bounds is not None:
        attention_mask = visible(bounds, queries, tokens)
    given = {name for name, x in kwargs.items() if x is not None} - UNREAD
    if given <= _OF_SDPA:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if own is None:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(sorted(given))} to attention, which 'ao_kv' does not "
            "know for keys outside of an AoCache; use model.set_attn_implementation('eager')"
        )
    if attention_mask is None and is_causal and queries > 1:
        attention_mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril()
        attention_mask = attention_mask[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, lowest
        )
    return own(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
