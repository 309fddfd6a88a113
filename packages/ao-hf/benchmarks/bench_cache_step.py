"""A step of attention over the quantized cache of transformers, and over `AoCache`: append, read, attend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from ao_hf import AoCache
from ao_quant.kv_cache import attend_to

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, arguments, paired, percentile, record, rounds_of

TEXT = """\
One layer of {heads} heads of keys and values of {dim} elements, {group} heads of queries for each, after
{tokens} tokens, batch 1, bfloat16, {threads} threads: a token is appended, and one query of each head reads
all. *QuantizedCache*: that of transformers in 4 bits by quanto (groups of 64, the last 128 tokens exact),
with `scaled_dot_product_attention` over what it returns. It quantizes everything anew whenever 128 tokens are
exact; that step is apart, and *mean of 128 steps* counts it once. `AoCache` quantizes a block of 128 tokens
at such a step. *x*: how many times as fast as QuantizedCache, the median over {rounds} rounds, with its
interval."""
THEIRS = "QuantizedCache, 4 bits"
RECIPES = ("kv4", "kv8")
HEADS, DIM, GROUP = 8, 128, 4


def config() -> Any:
    """Of a model with one such layer."""
    return transformers.LlamaConfig(
        hidden_size=HEADS * GROUP * DIM,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        num_hidden_layers=1,
    )


def theirs(key: torch.Tensor, value: torch.Tensor) -> Any:
    """Their cache after a prompt."""
    cache = transformers.QuantizedCache(
        backend="quanto", config=config(), nbits=4, q_group_size=64, residual_length=128
    )
    cache.update(key, value, 0)
    return cache


def step_of_theirs(cache: Any, new: Any, query: torch.Tensor) -> None:
    keys, values = cache.update(*new, 0)
    F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def step_of_ours(cache: AoCache, new: Any, query: torch.Tensor) -> None:
    cache.update(*new, 0)
    attend_to(cache.layers[0].kv, query)


def main() -> None:
    args = arguments(__doc__, tokens=4096, threads=2, rounds=5, steps=16)
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, DIM, generator=generator).bfloat16()

    key, value = draw(HEADS, args.tokens), draw(HEADS, args.tokens)
    new, query = (draw(HEADS, 1), draw(HEADS, 1)), draw(HEADS * GROUP, 1)
    with torch.inference_mode():
        peer = theirs(key, value)
        ours = {recipe: AoCache(config(), recipe) for recipe in RECIPES}
        for cache in ours.values():
            cache.update(key, value, 0)

        def steps(step: Callable[..., None], cache: Any) -> float:
            """Seconds a step, of steps in which nothing is due."""
            start = time.perf_counter()
            for _ in range(args.steps):
                step(cache, new, query)
            return (time.perf_counter() - start) / args.steps

        def fresh() -> float:
            # as after the prompt: no token is exact
            layer = peer.layers[0]
            layer.keys = layer.values = torch.tensor([], dtype=key.dtype)
            layer.cumulative_length = args.tokens
            return steps(step_of_theirs, peer)

        def back(recipe: str) -> float:
            cache = ours[recipe]
            found = steps(step_of_ours, cache)
            cache.crop(-args.steps)
            return found

        def overflow() -> float:
            start = time.perf_counter()
            theirs(key, value)
            return time.perf_counter() - start

        times: dict[str, Callable[[], float]] = {THEIRS: fresh}
        times |= {recipe: partial(back, recipe) for recipe in RECIPES}
        samples = rounds_of({**times, "all anew": overflow}, args.rounds)
    rows: list[Row] = []
    again = percentile(samples["all anew"], 50)
    for name in times:
        ratio = paired(samples, name, THEIRS)
        step = percentile(samples[name], 50)
        rows.append(
            {
                "cache": name,
                "step, ms": 1e3 * step,
                "all anew, ms": 1e3 * again if name == THEIRS else "",
                "mean of 128 steps, ms": 1e3 * (step + again / 128) if name == THEIRS else "",
                "x": ratio.median,
                "x, 95 %": ratio.interval(),
            }
        )
    text = TEXT.format(
        heads=HEADS, dim=DIM, group=GROUP, tokens=args.tokens, threads=args.threads, rounds=args.rounds
    )  # fmt: skip
    record(args.json, "A step over a quantized cache", text, rows)


if __name__ == "__main__":
    main()
