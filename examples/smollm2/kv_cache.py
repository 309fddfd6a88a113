"""Measure what quantized keys and values cost SmolLM2-135M, where every token is read from the cache.

Prints a table in Markdown. No token is exact but the weights are, so the figures are of the cache alone. With
`--decoding` each query reads alone, and in bfloat16, as tokens do while text is generated: by other kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from smollm2 import evaluate, model
from torch import Tensor, nn

from ao_quant.kv_cache import KV_RECIPES, KVCacheConfig, append_, attend_to, bytes_per_token, new_kv

#: tokens in a window, all of them in whole blocks
CONTEXT = 1024


def filled(config: KVCacheConfig, sizes: list[float], key: Tensor, value: Tensor) -> Any:
    """A cache of one layer that holds all tokens of a window; `sizes` gets its bytes per token."""
    batch, heads, tokens, dim = key.shape
    kv = new_kv(config, batch, heads, dim, tokens, value_dim=value.shape[3], dtype=key.dtype)
    append_(kv, key, value)
    sizes.append(bytes_per_token(kv))
    return kv


def attention(
    config: KVCacheConfig,
    sizes: list[float],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: a cache of one layer, filled and read."""
    assert attention_mask is None, "windows have no padding"
    kv = filled(config, sizes, key, value)
    return attend_to(kv, query, scale=scaling).transpose(1, 2), None


def decoding(
    config: KVCacheConfig,
    sizes: list[float],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same in bfloat16, with one query at a time, which sees the tokens up to its own."""
    assert attention_mask is None, "windows have no padding"
    query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    kv = filled(config, sizes, key, value)
    rows = []
    for token in range(key.shape[2]):
        stop = torch.full((len(key),), token + 1)
        rows.append(attend_to(kv, query[:, :, token : token + 1], scale=scaling, stop=stop))
    return torch.cat(rows, 2).transpose(1, 2).float(), None


@torch.inference_mode()
def predict(network: nn.Module, window: Tensor) -> Tensor:
    """The logarithms of the probabilities of the next token, (tokens − 1, vocabulary)."""
    return F.log_softmax(network(window[None], use_cache=False).logits[0, :-1].float(), dim=-1)


def measured(network: Any, names: list[str], windows: int, attend: Any) -> Iterator[dict[str, Any]]:
    """What each recipe costs, over so many windows of text; `attend`: `attention` or `decoding`."""
    from transformers import AttentionInterface

    tokens = model.tokens(evaluate.text())
    starts = torch.linspace(0, len(tokens) - CONTEXT, windows).long().tolist()
    for name in names:
        sizes: list[float] = []
        config = replace(KV_RECIPES[name], window=0)
        AttentionInterface.register(f"ao_{name}", partial(attend, config, sizes))
        sums = torch.zeros(3, dtype=torch.float64)
        for start in starts:
            window = tokens[start : start + CONTEXT]
            network.set_attn_implementation("sdpa")
            exact = predict(network, window)
            network.set_attn_implementation(f"ao_{name}")
            found = predict(network, window)
            kl = F.kl_div(found, exact, log_target=True, reduction="sum")
            loss = F.nll_loss(found, window[1:], reduction="sum")
            same = (found.argmax(-1) == exact.argmax(-1)).sum()
            sums += torch.stack([kl, loss, same]).double()
        kl, loss, same = (sums / (len(starts) * (CONTEXT - 1))).tolist()
        yield {
            "cache": name,
            "bytes per token": round(len(network.model.layers) * sizes[0]),
            "KL, nats": kl,
            "perplexity": float(torch.tensor(loss).exp()),
            "same likeliest token": same,
        }


def main() -> None:
    """Measure all recipes, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(KV_RECIPES))
    parser.add_argument("--windows", type=int, default=3, help=f"of {CONTEXT} tokens of text")
    parser.add_argument("--decoding", action="store_true", help="one query at a time, in bfloat16")
    arguments = parser.parse_args()
    attend = decoding if arguments.decoding else attention
    for row in measured(model.load(), arguments.recipes, arguments.windows, attend):
        name, size, kl, perplexity, same = row.values()
        if name == arguments.recipes[0]:
            print("".join(f"| {column} " for column in row) + "|")
            print("| --- " * len(row) + "|")
        print(f"| {name} | {size} | {kl:.5f} | {perplexity:.3f} | {same:.3f} |", flush=True)


if __name__ == "__main__":
    main()
