"""Attention over quantized keys and values, beside torch's over bfloat16: decoding, and a text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Case, Contender, Line, Setup, built, distance, measured
from torch import Tensor

from ao_core import quantize_tensor
from ao_core.ext import attend, registry
from ao_core.ext.kernels import Attention, attend_call, select
from ao_quant.kv_cache import KV_RECIPES

#: heads of queries and of keys, elements of a head: those of Llama-3-8B
HEADS, KV_HEADS, DIM = 32, 8, 128
#: slots of the exact tail, and tokens in it
SLOTS, RECENT = 256, 128
#: (rows of a batch, tokens of context, queries); the most important first
CALLS = ((1, 32768, 1), (1, 131072, 1), (1, 4096, 1), (32, 4096, 1), (1, 4096, 4096))
TINY = ((1, 256, 1), (1, 256, 256))
#: the tensors of one call
Cache = tuple[Tensor, ...]


def cases(setup: Setup) -> list[Case]:
    """One for each call."""
    calls = TINY if setup.tiny else CALLS
    return [
        Case(
            f"{batch} × {context} tokens, {queries} queries",
            partial(of_call, setup, batch, context, queries),
        )
        for batch, context, queries in calls
    ]


def of_call(setup: Setup, batch: int, context: int, queries: int) -> Iterator[Line]:
    """Every recipe of KV caches, with random keys and values."""
    q = setup.randn(batch, HEADS, queries, DIM)
    makers = {"bf16": partial(of_dense, setup, batch, context, queries)}
    for recipe in KV_RECIPES:
        makers[f"ao {recipe}"] = partial(ours, setup, recipe, batch, context, queries)
    about = {"name": "decoding" if queries == 1 else "a text", "context": context}
    shape = [batch, KV_HEADS, context, DIM]
    yield from measured(setup, built(makers), q, {**about, "shape": shape, "rows": queries})


def of_dense(setup: Setup, batch: int, context: int, queries: int) -> Contender:
    """`F.scaled_dot_product_attention` of torch, which reads each head of keys once."""
    kv = tuple(setup.randn(batch, KV_HEADS, context, DIM) for _ in range(2))
    size = sum(x.numel() * x.element_size() for x in kv)

    def call(q: Tensor, kv: Cache) -> Tensor:
        k, v = kv
        causal = q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    # many queries wait for products, not for memory
    return Contender(setup.copies(kv, size), call, size if queries == 1 else 0, lambda q: "sdpa")


def ours(setup: Setup, recipe: str, batch: int, context: int, queries: int) -> Contender:
    """A recipe, by the best kernel; the last tokens are exact."""
    config = KV_RECIPES[recipe]
    key, value = (
        quantize_tensor(setup.randn(batch, KV_HEADS, context - RECENT, DIM), spec)
        for spec in config.formats(DIM, DIM)
    )
    tails = [setup.randn(batch, KV_HEADS, SLOTS, DIM) for _ in range(2)]
    center = setup.randn(batch, KV_HEADS, 1, DIM, dtype=torch.float32) if config.center else None
    counts = torch.tensor([context, context - RECENT], device=key.device)
    exact = sum(x.numel() * x.element_size() for x in tails) * RECENT // SLOTS
    size = key.stored_bytes + value.stored_bytes + exact
    mode = Attention(DIM**-0.5)

    def call(q: Tensor, kv: Cache) -> Tensor:
        return attend(q, *kv, counts, tail_key=tails[0], tail_value=tails[1], center=center)

    def given(q: Tensor) -> tuple[Tensor | None, ...]:
        return (q, key, value, counts, *tails, center, None, None, None)

    def kernel(q: Tensor) -> str:
        return select(attend_call(*given(q), mode)).name  # type: ignore[arg-type]

    def error(q: Tensor, found: Tensor) -> float:
        reference = registry.ops.get("attend").reference
        return distance(found.float(), reference(*given(q), mode).float())

    copies = setup.copies((key, value), size)
    return Contender(copies, call, size if queries == 1 else 0, kernel, error)
