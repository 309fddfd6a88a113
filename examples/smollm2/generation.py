"""Quantized keys and values inside transformers: SmolLM2-135M with `AoCache`, from a greedy text to a needle.

- `python generation.py text`: the first greedy tokens, beside those of an exact cache
- `python generation.py chunks`: KL where tokens come at once, in chunks, and one by one
- `python generation.py needle`: numbers that were said thousands of tokens ago
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from smollm2 import evaluate, model
from torch import Tensor

from ao_hf import AoCache
from ao_quant.kv_cache import KV_RECIPES

#: a sentence of each kind is said once in a long text, and its end is asked for
NEEDLES = (
    ("The magic number of Rome is", " 7481"),
    ("The secret password of Oslo is", " marmalade"),
    ("The favourite animal of Lima is the", " penguin"),
    ("The best friend of Cairo's mayor is called", " Victoria"),
)
#: tokens of a prefill at once
CHUNK = 512


@torch.inference_mode()
def forward(network: Any, cache: Any, tokens: Tensor, chunk: int) -> Iterator[Tensor]:
    """The logarithms of the probabilities after each token, in chunks (t, vocabulary)."""
    for part in tokens.split(chunk):
        logits = network(part[None], past_key_values=cache, use_cache=True).logits[0]
        yield F.log_softmax(logits.float(), dim=-1)


def greedy(network: Any, tokens: Tensor, kv: str, count: int) -> Tensor:
    """The tokens that follow, (count,)."""
    cache = AoCache(network.config, kv)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = network.generate(tokens[None], past_key_values=cache, max_new_tokens=count, **options)
    return found[0, len(tokens) :]


def text(network: Any, recipes: list[str], count: int = 64) -> None:
    """Print how many of the first greedy tokens are those of an exact cache."""
    prompt = model.tokens(evaluate.text())[:600]
    exact = greedy(network, prompt, "exact", count)
    for name in recipes:
        same = greedy(network, prompt, name, count) == exact
        first = count if bool(same.all()) else int((~same).int().argmax())
        print(f"{name}: the first {first} of {count} greedy tokens are the same", flush=True)


def codes(cache: AoCache) -> list[Tensor]:
    """The codes of keys and values of all layers; what memory holds behind them is left out."""
    stored = [
        (kv.coded, part) for kv in (x.kv for x in cache.layers) for part in (kv.key, kv.value)
    ]
    return [part.leaves[0][:, :, :coded] for coded, part in stored]


class Recorder(AoCache):
    """A cache that keeps the keys and values that it is given."""

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """As that of `AoCache`."""
        self.__dict__.setdefault("given", {}).setdefault(layer, (key, value))
        return super().update(key, value, layer, *args, **kwargs)


def replayed(cache: Recorder, config: Any, chunk: int) -> AoCache:
    """A cache that was given the same keys and values in chunks."""
    made = AoCache(cache.model_config, config)
    splits = [
        zip(key.split(chunk, 2), value.split(chunk, 2), strict=True)
        for key, value in cache.given.values()
    ]
    for parts in zip(*splits, strict=True):
        for layer, (key, value) in enumerate(parts):
            made.update(key, value, layer)
    return made


def chunks(network: Any, recipes: list[str], context: int = 1024) -> None:
    """Print KL against an exact cache where every key and value is read in its format, and compare codes."""
    from transformers import DynamicCache

    every = model.tokens(evaluate.text())
    window = every[len(every) // 2 :][:context]
    exact = torch.cat(list(forward(network, DynamicCache(config=network.config), window, context)))
    print("| cache | tokens at once | KL, nats | same codes as at once | same for the same keys |")
    print("| --- | --- | --- | --- | --- |")
    for name in recipes:
        config = replace(KV_RECIPES[name], window=0)
        for chunk in (context, 64, 1):
            cache = (Recorder if chunk == context else AoCache)(network.config, config)
            found = torch.cat(list(forward(network, cache, window, chunk)))
            if isinstance(cache, Recorder):
                whole = cache
            kl = F.kl_div(found, exact, log_target=True, reduction="sum") / context
            share = [
                (a == b).float().mean() for a, b in zip(codes(cache), codes(whole), strict=True)
            ]
            again = all(map(torch.equal, codes(replayed(whole, config, chunk)), codes(whole)))
            print(
                f"| {name} | {chunk} | {kl:.5f} | {torch.stack(share).mean():.4f} | {again} |",
                flush=True,
            )


def haystack(tokens: int) -> Tensor:
    """A text of so many tokens with the needles in it, evenly spread."""
    said = [model.tokens(f"\n\n{start}{end}.\n\n") for start, end in NEEDLES]
    filler = model.tokens(evaluate.text())[: tokens - sum(map(len, said))]
    each = len(filler) // (len(said) + 1)
    parts = []
    for i, sentence in enumerate(said):
        parts += [filler[i * each : (i + 1) * each], sentence]
    return torch.cat([*parts, filler[len(said) * each :]])


def needle(network: Any, recipes: list[str], context: int = 8000) -> list[dict[str, Any]]:
    """Print whether each sentence is ended as it was before, and how likely that end is."""
    hay, results = haystack(context), list[dict[str, Any]]()
    for name in recipes:
        cache = AoCache(network.config, name)
        for _ in forward(network, cache, hay, CHUNK):
            pass
        held = cache.get_seq_length()
        size = cache.report().nbytes / 1e6
        for start, end in NEEDLES:
            ask = model.tokens(f"\n\n{start}")
            answer = model.tokens(f"\n\n{start}{end}")[len(ask) :]
            written, logs = [], []
            (last,) = forward(network, cache, ask, len(ask))
            for token in answer:
                logs.append(float(last[-1, token]))
                written.append(int(last[-1].argmax()))
                (last,) = forward(network, cache, token[None], 1)
            cache.crop(held - cache.get_seq_length())
            found = written == answer.tolist()
            results.append(
                {
                    "cache": name,
                    "MB": size,
                    "needle": start + end,
                    "found": found,
                    "log p": sum(logs),
                }
            )
            print(
                f"{name}, {size:.0f} MB: “{start}{end}” found {found}, log probability {sum(logs):.3f}",
                flush=True,
            )
    return results


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["text", "chunks", "needle"])
    parser.add_argument(
        "recipes", nargs="*", default=["kv8", "k8v4", "kv4"], help="exact, too, of a needle"
    )
    parser.add_argument("--bfloat16", action="store_true", help="instead of float32")
    arguments = parser.parse_args()
    network: Any = model.load()
    if arguments.bfloat16:
        network = network.bfloat16()
    network.set_attn_implementation("ao_kv")
    run = {"text": text, "chunks": chunks, "needle": needle}[arguments.what]
    run(network, arguments.recipes)


if __name__ == "__main__":
    main()
