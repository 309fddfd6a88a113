"""Every bar of the CPU kernels in one command: case, bar, aim, what was measured, and whether it is met."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # decoder
import bars
import decoding
import linear
from bench_quantize_model import measure
from decoder import Shape
from llama import version
from ours import ours
from torch_linear import DENSE

from benchmarking import Row, arguments, record

TEXT = """\
What the kernels have to reach in {threads} threads. *measured*: the median of the ratios within rounds,
greater is faster; *95 %*: its interval, a bootstrap of rounds. A bar is met where the whole interval reaches
it. Linear layers are 4096 × 4096 and bfloat16 where nothing is said; their samples begin with a call that is
not timed, for the contender's code. The share of read at one row compares with a C loop that reads the codes
of the same copies. The model is the decoder above. Memory, which bounds all of them at one row, is shared
with other machines: while it is slow, peers that read at nearly its rate cannot be passed by much."""


def linear_layers(percent: int, llama: str) -> list[Row]:
    """The bars of one linear layer."""
    found = linear.makers(llama)
    named = {name for bar in bars.LINEAR for name in (bar.ours, bar.peer)}
    wanted = named | set(ours()) | set(DENSE.values())
    chosen = [make for name, make in found.items() if name in wanted]
    rounds = {m: max(1, count * percent // 100) for m, count in linear.ROUNDS.items()}
    cases = linear.cases(chosen, linear.SHAPES[:1], rounds)
    return bars.linear_rows({case.rows: case for case in cases})


def decoder(percent: int, llama: str, threads: int) -> list[Row]:
    """The bars of decoding and prefill."""
    found = decoding.makers(llama, Shape(), threads)
    named = {name for bar in (*bars.DECODE, *bars.PREFILL) for name in (bar.ours, bar.peer)}
    chosen = [make() for name, make in found.items() if name in named]
    results = decoding.measured(chosen, decoding.TOKENS, percent)
    return [
        *bars.compared(bars.DECODE, results.decode, "decoding"),
        *bars.compared(bars.PREFILL, results.prefill, f"prefill of {decoding.TEXT}"),
    ]


def quantizing(percent: int, threads: int) -> list[Row]:
    """The bars of `quantize_`."""
    (row,) = measure(["ao int4 g32"], max(1, 3 * percent // 100), threads, Shape.layers)
    seconds, peak = row["p10"], row["peak"]
    return [
        bars.at_most("quantize_ to int4 g32, seconds", bars.SECONDS, seconds),
        bars.at_most("quantize_ to int4 g32, peak over model", bars.PEAK, peak),
    ]


def main() -> None:
    args = arguments(__doc__, threads=2, percent=100, parts="linear,decoder,quantize", llama="")
    torch.set_num_threads(args.threads)
    rows = []
    with torch.inference_mode():
        if "linear" in args.parts:
            rows += linear_layers(args.percent, args.llama)
        if "decoder" in args.parts:
            rows += decoder(args.percent, args.llama, args.threads)
    if "quantize" in args.parts:
        rows += quantizing(args.percent, args.threads)
    text = TEXT.format(threads=args.threads)
    record(args.json, "Bars of the CPU kernels", text, rows, versions=version(args.llama))


if __name__ == "__main__":
    main()
