"""Where the time of a token goes in transformers' own `generate`: parts outside of the decoder blocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface

sys.path.insert(0, str(Path(__file__).parent))
from bench_generate import SHAPES, build, generate

from ao_hf import unfuse
from ao_hf.cache.names import ATTENTION
from ao_hf.fusing.decoder import FusedDecoder
from ao_hf.generation.caches import make_cache
from benchmarking import Row, arguments, record

ABOUT = """\
SmolLM2-135M with random weights in 4 bits, `AoCache(model.config, "kv8")`, greedy `model.generate` of
transformers in eager mode, {threads} threads: microseconds for each token after the first, the median of
{rounds} rounds of {tokens} tokens. *before*: with the decoder's own forward, its mask and its rotary
embedding. *blocks* are all decoder blocks, attention and cache included; *loop* is what `generate` does
outside of the model."""
MEASURED = ("mask", "rotary", "embedding", "blocks", "norm", "head", "decoder", "model", "all")


class Stopwatch:
    """Adds up the seconds that callables take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(MEASURED, 0.0)

    def add(self, part: str, seconds: float) -> None:
        """Of one call."""
        self.seconds[part] += seconds

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same callable, whose time counts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(part, time.perf_counter() - start)

        return call


@contextmanager
def timing(model: Any, watch: Stopwatch) -> Iterator[None]:
    """A time in which the parts of a model are timed."""
    decoder = model.model
    parts = [(decoder.embed_tokens, "embedding"), (decoder.norm, "norm"), (model.lm_head, "head")]
    parts += [(decoder.rotary_emb, "rotary"), (decoder, "decoder"), (model, "model")]
    fused = vars(decoder).get("forward")
    mask = AttentionMaskInterface()[ATTENTION]
    before = [(module, vars(module).get("forward")) for module, _ in parts]
    tables = fused._tables if isinstance(fused, FusedDecoder) else None
    if tables is not None:
        fused._tables = watch.timed("rotary", tables)
        parts = [(module, part) for module, part in parts if part != "rotary"]
    AttentionMaskInterface.register(ATTENTION, watch.timed("mask", mask))
    for module, part in parts:
        module.forward = watch.timed(part, module.forward)
    # blocks with another forward would not run as one op
    started = [0.0]
    handles = [
        decoder.layers[0].register_forward_pre_hook(
            lambda *_: started.__setitem__(0, time.perf_counter())
        ),
        decoder.layers[-1].register_forward_hook(
            lambda *_: watch.add("blocks", time.perf_counter() - started[0])
        ),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        AttentionMaskInterface.register(ATTENTION, mask)
        if tables is not None:
            fused._tables = tables
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def parts(model: Any, tokens: int) -> dict[str, float]:
    """Microseconds of each part for a token."""
    generate(model, "kv8", make_cache(model, "kv8"), 64, 4)
    watch, cache = Stopwatch(), make_cache(model, "kv8")
    # the first token makes the cache, and is not counted
    with timing(model, watch):
        generate(model, "kv8", cache, 64, 1)
        watch.seconds = dict.fromkeys(MEASURED, 0.0)
        done = generate(model, "kv8", cache, 65, tokens + 1)
    found = {part: seconds / (tokens + 1) * 1e6 for part, seconds in watch.seconds.items()}
    found["all"] = done.seconds_after / tokens * 1e6
    inner = ("mask", "rotary", "embedding", "blocks", "norm")
    return {
        **{part: found[part] for part in (*inner, "head")},
        "rest of the decoder": found["decoder"] - sum(found[part] for part in inner),
        "rest of the model": found["model"] - found["decoder"] - found["head"],
        "loop": found["all"] - found["model"],
        "all but the blocks": found["all"] - found["blocks"],
        "all": found["all"],
    }


def main() -> None:
    args = arguments(__doc__, threads=2, rounds=7, tokens=96)
    torch.set_num_threads(args.threads)
    model = build(SHAPES["SmolLM2-135M"])
    fused = vars(model.model).get("forward")
    found: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    for _ in range(args.rounds):
        for name, rounds in found.items():
            vars(model.model).pop("forward", None)
            if name == "now":
                model.model.forward = fused
            rounds.append(parts(model, args.tokens))
    unfuse(model)
    rows: list[Row] = [
        {"part": part, **{f"{name}, µs": median(x[part] for x in rounds) for name, rounds in found.items()}}
        for part in found["now"][0]
    ]  # fmt: skip
    about = ABOUT.format(threads=args.threads, rounds=args.rounds, tokens=args.tokens)
    record(args.json, "Parts of a token of `generate`", about, rows)


if __name__ == "__main__":
    main()
