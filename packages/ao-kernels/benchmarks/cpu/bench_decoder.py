"""Decoding and prefill of a Llama-shaped model of 1.1 billion parameters, beside peers."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # decoder
from decoder import Shape
from decoding import BF16, TEXT, TOKENS, Results, makers, measured
from llama import version

from benchmarking import Row, Samples, arguments, paired, percentile, record

ABOUT = """\
A Llama-shaped decoder of {billions:.1f} billion random parameters ({shape.layers} layers, dim {shape.dim},
{shape.heads} heads, {shape.kv_heads} for keys and values, FFN {shape.ffn}, vocabulary {shape.vocab}) in
{threads} threads: tokens a second when {tokens} are generated one by one from nothing, and for a text of
{text}. All torch contenders run the same code in eager mode; *compiled*: as one program of AOTInductor
for each token. They stay in one process and take turns in shuffled rounds with `llama-bench` on the same
shape; ratios are medians over the rounds, with intervals. *share of read*: the bytes of the weights that a
token is multiplied by, over what is read in that time."""


def row(results: Results, name: str) -> Row:
    """One contender: decoding, then prefill."""
    decode, prefill = results.decode[name], results.prefill.get(name)
    return {
        "contender": name,
        "tokens/s": 1 / median(decode),
        "p10 of times": 1 / percentile(decode, 10),
        **_times("× torch bf16", results.decode, name),
        "GB a token": results.contenders[name].nbytes / 1e9,
        "share of read": results.share(name).median,
        "share of read, 95 %": results.share(name).interval(),
        "prefill tokens/s": TEXT / median(prefill) if prefill else "",
        "prefill, p10 of times": TEXT / percentile(prefill, 10) if prefill else "",
        **_times("prefill × torch bf16", results.prefill, name),
    }


def _times(column: str, samples: Samples, name: str) -> Row:
    found = paired(samples, name, BF16) if {BF16, name} <= set(samples) else None
    return {
        column: found.median if found else "",
        f"{column}, 95 %": found.interval() if found else "",
    }


def main() -> None:
    args = arguments(
        __doc__,
        threads=2,
        percent=100,  # of the usual rounds
        tokens=TOKENS,
        layers=Shape.layers,
        contenders="",
        llama="",
    )
    torch.set_num_threads(args.threads)
    shape = Shape(layers=args.layers)
    parts = args.contenders.split(",")
    found = makers(args.llama, shape, args.threads)
    with torch.inference_mode():
        chosen = [make() for name, make in found.items() if any(part in name for part in parts)]
        results = measured(chosen, args.tokens, args.percent)
    rows = [row(results, name) for name in results.contenders]
    sizes = {"shape": shape, "billions": shape.parameters / 1e9, "tokens": args.tokens}
    about = ABOUT.format(threads=args.threads, text=TEXT, **sizes)
    record(args.json, "Decoding on the CPU", about, rows, versions=version(args.llama))


if __name__ == "__main__":
    main()
