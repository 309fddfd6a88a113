"""Attention of one token over quantized keys and values, beside torch's over bfloat16, and appending."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import cycle, product
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from reader import READER, reader

from ao_quant.kv_cache import QuantizedKV, append_, attend_to, bytes_per_token, new_kv
from benchmarking import Row, Samples, arguments, interleaved, paired, percentile, record

TEXT = """\
One query of each head in {threads} threads, contenders in alternate rounds of one process. Each contender has
at least {size} MB, and the reader {size} MB: copies of the cache take turns. So neither the data nor the code
of a call is in the processor's caches, which costs about 0.2 ms.
*heads*: of keys and values × elements, heads of queries for each. *share of read*: bytes of keys and
values with their scales, over what the reader (a C loop in the same threads and rounds) reads in that time;
*x sdpa*: how many times as fast as `scaled_dot_product_attention` over bfloat16 with `enable_gqa`. Both are
medians over the rounds, with intervals. *append*: the mean time of `append_` over {steps} tokens, blocks that
are quantized meanwhile included, as a share of `append_` and `attend_to` together over {short} tokens: what
one layer does of a step besides its matmuls."""
SDPA = "sdpa bf16"
#: heads of keys and values, elements, heads of queries for each: Llama-3-8B, SmolLM2-135M
SHAPES = ((8, 128, 4), (3, 64, 3))
RECIPES = ("kv8", "k8v4", "kv4", "kv_fp8")
#: tokens that are appended for the share of a step, and the context that step has
STEPS, SHORT = 256, 8192
#: tokens that are filled in at a time
_SLAB = 4096
#: bytes of all copies of a cache, and of the reader
_SIZE = 384 << 20


def filled(recipe: str, heads: int, size: int, tokens: int) -> QuantizedKV:
    """A cache of random tokens."""
    kv = new_kv(recipe, 1, heads, size, tokens + 3 * STEPS)
    for begin in range(0, tokens, _SLAB):
        count = min(_SLAB, tokens - begin)
        append_(kv, *torch.randn(2, 1, heads, count, size).bfloat16())
    return kv


def append_share(
    recipe: str, heads: int, size: int, group: int, rounds: int
) -> tuple[float, float]:
    """Seconds of `append_` for one token, and its share of that and `attend_to`."""
    q = torch.randn(1, heads * group, 1, size).bfloat16()
    key, value = torch.randn(2, 1, heads, 1, size).bfloat16()
    full = filled(recipe, heads, size, SHORT)

    def steps(kv: QuantizedKV) -> None:
        before = kv.counts.clone()
        for _ in range(STEPS):
            append_(kv, key, value)
        kv.counts.copy_(before)

    samples = interleaved(
        {"append": partial(steps, full), "attend": partial(attend_to, full, q)},
        rounds=rounds,
        repeats=1,
    )
    append, attend = percentile(samples["append"], 50) / STEPS, percentile(samples["attend"], 50)
    return append, append / (append + attend)


def turns(call: Callable[..., object], caches: Sequence[tuple[Any, ...]]) -> Callable[[], object]:
    """A call over one of some caches, the next one each time."""
    order = cycle(caches)
    return lambda: call(*next(order))


def copies(count: int, *parts: Any) -> list[tuple[Any, ...]]:
    """So many of the same."""
    return [parts, *(deepcopy(parts) for _ in range(count - 1))]


def rows_of(heads: int, size: int, group: int, tokens: int, rounds: int) -> list[Row]:
    """A row for torch's attention, and for each recipe beside it."""
    q = torch.randn(1, heads * group, 1, size).bfloat16()
    k, v = torch.randn(2, 1, heads, tokens, size).bfloat16()
    count = ceil(_SIZE / (k.nbytes + v.nbytes))
    dense = partial(F.scaled_dot_product_attention, q, enable_gqa=True)
    (reading,), sdpa = reader(_SIZE, pieces=1).calls(1), turns(dense, copies(count, k, v))
    shape: Row = {"heads": f"{heads} × {size}, {group}", "tokens": tokens}
    rows: list[Row] = []
    for name in RECIPES:
        kv = filled(name, heads, size, tokens)
        nbytes = int(bytes_per_token(kv) * tokens)
        ours = turns(lambda one: attend_to(one, q), copies(ceil(_SIZE / nbytes), kv))
        samples = interleaved({SDPA: sdpa, READER: reading, name: ours}, rounds=rounds, repeats=1)
        appended = append_share(name, heads, size, group, rounds)
        if not rows:
            rows.append(row(shape, SDPA, samples, k.nbytes + v.nbytes, None))
        rows.append(row(shape, name, samples, nbytes, appended))
    return rows


def row(
    shape: Row, name: str, samples: Samples, nbytes: int, appended: tuple[float, float] | None
) -> Row:
    """One contender."""
    share, ratio = paired(samples, name, READER).scaled(nbytes / _SIZE), paired(samples, name, SDPA)
    return {
        **shape,
        "contender": name,
        "MB": nbytes / 1e6,
        "p10 ms": 1e3 * percentile(samples[name], 10),
        "median ms": 1e3 * percentile(samples[name], 50),
        "share of read": share.median,
        "share, 95 %": share.interval(),
        "x sdpa": ratio.median,
        "x sdpa, 95 %": ratio.interval(),
        "append µs": 1e6 * appended[0] if appended else "",
        "append, share": appended[1] if appended else "",
    }


def main() -> None:
    args = arguments(__doc__, tokens="32768,131072", threads=2, rounds=12, shapes="0,1")
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    with torch.inference_mode():
        for number, tokens in product(args.shapes.split(","), args.tokens.split(",")):
            rows += rows_of(*SHAPES[int(number)], int(tokens), args.rounds)
    sizes = {"threads": args.threads, "steps": STEPS, "short": SHORT, "size": _SIZE >> 20}
    title = "Attention over quantized keys and values on the CPU"
    record(args.json, title, TEXT.format(**sizes), rows, keys=("heads", "tokens", "contender"))


if __name__ == "__main__":
    main()
