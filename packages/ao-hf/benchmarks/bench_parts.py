"""Where the time of a token goes in transformers' own `generate`: op, rest of the forward, loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from bench_generate import SHAPES, build, generate

from ao_core.ext.kernels import CachedBlocks
from ao_hf.generation.caches import make_cache
from benchmarking import Row, arguments, record

ABOUT = """\
SmolLM2-135M with random weights in 4 bits, `AoCache(model.config, "kv8")`, greedy `model.generate` of
transformers in eager mode, {threads} threads: microseconds for each token after the first, the median of
{rounds} rounds of {tokens} tokens. *op*: the decoder blocks, attention and cache included, and in the last
column norm and head, too. *rest of the forward*: what else the model does. *loop* is what `generate` does
outside of the model. *blocks*: one op for all blocks, called one by one; *decoder*: and no mask, and rotary
embedding from a table; *model*: and logits from the same op, which is what `ao_hf.fuse` does."""
#: modules with a fused forward of their own, besides the blocks
WAYS = {"blocks": (), "decoder": ("model",), "model": ("model", "")}


class Stopwatch:
    """Adds up the seconds that callables take."""

    def __init__(self) -> None:
        self.seconds = {"op": 0.0, "forward": 0.0}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same callable, whose time counts."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return call


@contextmanager
def timing(model: Any, watch: Stopwatch) -> Iterator[None]:
    """A time in which the op and the model are timed."""
    op, forward = CachedBlocks.__call__, vars(model).get("forward")
    CachedBlocks.__call__ = watch.timed("op", op)  # type: ignore[method-assign]
    model.forward = watch.timed("forward", model.forward)
    try:
        yield
    finally:
        CachedBlocks.__call__ = op  # type: ignore[method-assign]
        vars(model).pop("forward")
        if forward is not None:
            model.forward = forward


def parts(model: Any, tokens: int) -> dict[str, float]:
    """Microseconds of each part for a token."""
    watch, cache = Stopwatch(), make_cache(model, "kv8")
    # the first tokens make the cache, and are not counted
    generate(model, "kv8", cache, 64, 4)
    with timing(model, watch):
        done = generate(model, "kv8", cache, 68, tokens + 1)
    op, forward = (seconds / (tokens + 1) * 1e6 for seconds in watch.seconds.values())
    whole = done.seconds_after / tokens * 1e6
    return {"op": op, "rest of the forward": forward - op, "loop": whole - forward, "all": whole}


def main() -> None:
    args = arguments(__doc__, threads=2, rounds=7, tokens=96)
    torch.set_num_threads(args.threads)
    model = build(SHAPES["SmolLM2-135M"])
    fused = {name: vars(model.get_submodule(name)).pop("forward") for name in WAYS["model"]}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, names in WAYS.items():
            for name in names:
                model.get_submodule(name).forward = fused[name]
            found[way].append(parts(model, args.tokens))
            for name in names:
                del model.get_submodule(name).forward
    rows: list[Row] = [
        {"part": part, **{f"{way}, µs": median(x[part] for x in rounds) for way, rounds in found.items()}}
        for part in found["model"][0]
    ]  # fmt: skip
    about = ABOUT.format(threads=args.threads, rounds=args.rounds, tokens=args.tokens)
    record(args.json, "Parts of a token of `generate`", about, rows)


if __name__ == "__main__":
    main()
