"""Memory of an `AoCache` for 131,072 tokens of Llama-3.1-8B's shape: filled and read, in a fresh process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from benchmarking import Row, arguments, in_fresh_processes, record
from process_memory import peak, reset_peak, resident

SHAPE = "llama-3.1-8b"
#: recipes that fit into 20 GB
RECIPES = ("kv8", "kv4")
TOKENS = 131072
#: tokens that come at once; pieces are all the same
PIECE = 4096

TEXT = """\
`AoCache(config, recipe, max_cache_len={tokens})` of Llama-3.1-8B's shape, without the model: each of the 32
layers gets {tokens} random keys and values of 8 heads of 128 in bfloat16, in pieces of {piece}, and 32 heads
of one query then read all of them. *bfloat16* is what keys and values would take as they are. *computed* is
tokens × the bytes of one in a block, and *limit* adds 2 % and the exact tails. *cache* is what the tensors of
the cache take, *peak* how much the process grew at the most while it filled and read, and *temporary* what
that is more than the cache. *error* is the greatest of all layers, of what attention read, relative to exact
attention in float64."""


def child(recipe: str, tokens: int) -> None:
    """Fill and read once; print seconds and bytes as JSON."""
    import torch

    from ao_hf import AoCache
    from ao_hf.generation.presets import skeleton
    from ao_quant.kv_cache import attend_to

    model = skeleton(SHAPE)
    model.set_attn_implementation("ao_kv")
    config, draws = model.config, torch.Generator().manual_seed(0)
    heads, dim = config.num_key_value_heads, config.head_dim
    draw: dict[str, Any] = {"generator": draws, "dtype": torch.bfloat16}
    key, value = (torch.randn(1, heads, min(PIECE, tokens), dim, **draw) for _ in range(2))
    query = torch.randn(1, config.num_attention_heads, 1, dim, **draw)

    small = AoCache(config, recipe, max_cache_len=key.shape[2])
    small.update(key, value, 0)
    attend_to(small.layers[0].kv, query)  # kernels are chosen and built
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), enable_gqa=True
    )
    before = resident()
    reset_peak()
    start = time.perf_counter()
    cache = AoCache(config, recipe, max_cache_len=tokens)
    for layer in cache.layers:
        for place in range(0, tokens, PIECE):
            layer.update(key[:, :, : tokens - place], value[:, :, : tokens - place])
    filled = time.perf_counter() - start
    outputs = [attend_to(layer.kv, query) for layer in cache.layers]
    most = peak()
    report = cache.report()
    tails = sum(x.kv.tail_key.nbytes + x.kv.tail_value.nbytes for x in cache.layers)
    errors = [float((x.double() - expected).norm() / expected.norm()) for x in outputs]
    print(
        json.dumps(
            {
                "seconds": filled,
                "dense": 2 * tokens * heads * dim * 2 * len(cache.layers),
                "computed": report.bytes_per_token * tokens,
                "tails": tails,
                "cache": report.nbytes,
                "peak": most - before,
                "error": max(errors),
            }
        )
    )


def measure(tokens: int, recipes: list[str]) -> list[Row]:
    """One row for each recipe."""
    _, printed = in_fresh_processes(__file__, recipes, 1, tokens)
    rows: list[Row] = []
    for recipe in recipes:
        (run,) = printed[recipe]
        limit = 1.02 * run["computed"] + run["tails"]
        temporary = run["peak"] - run["cache"]
        rows.append(
            {
                "recipe": recipe,
                "tokens": tokens,
                "bfloat16 GB": run["dense"] / 1e9,
                "computed GB": run["computed"] / 1e9,
                "cache GB": run["cache"] / 1e9,
                "limit GB": limit / 1e9,
                "peak GB": run["peak"] / 1e9,
                "temporary MB": temporary / 1e6,
                "error": run["error"],
                "verdict": "met"
                if run["cache"] <= limit and temporary < run["cache"] / 10
                else "missed",
            }
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        args = arguments(__doc__, tokens=TOKENS, recipes=",".join(RECIPES))
        text = TEXT.format(tokens=f"{args.tokens:,}", piece=f"{PIECE:,}")
        rows = measure(args.tokens, args.recipes.split(","))
        record(args.json, "A cache of 131,072 tokens of Llama-3.1-8B's shape", text, rows)
