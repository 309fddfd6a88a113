"""Seconds and peak memory of quantizing the decoder of 1.1 billion parameters, in fresh processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # decoder
from benchmarking import Row, arguments, in_fresh_processes, percentile, record
from process_memory import peak, reset_peak, resident

TEXT = """\
All linear layers of the Llama-shaped bfloat16 decoder of 1.1 billion parameters, each time in a fresh
process, in alternate rounds, in {threads} threads. *peak*: the process's greatest resident memory meanwhile,
over what it had with the model loaded; *after*: the linear weights, beside the bytes that they had."""


def child(name: str, threads: int, layers: int) -> None:
    """Quantize once and print seconds and bytes as JSON."""
    import torch
    from decoder import Shape, random_model
    from quantizers import linear_bytes, quantizers

    from ao_core.ext import registry

    torch.set_num_threads(threads)
    quantize = quantizers()[name]
    registry.recipes.names()  # plugins are loaded once, whatever is quantized
    model = random_model(Shape(layers=layers))
    dense, before = linear_bytes(model), resident()
    reset_peak()
    start = time.perf_counter()
    quantize(model)
    seconds = time.perf_counter() - start
    after = linear_bytes(model)
    print(json.dumps({"seconds": seconds, "peak": peak() / before, "after": after / dense}))


def measure(names: list[str], rounds: int, threads: int, layers: int) -> list[Row]:
    """One row for each way to quantize."""
    samples, printed = in_fresh_processes(__file__, names, rounds, threads, layers)
    return [
        {
            "contender": name,
            "seconds": median(samples[name]),
            "p10": percentile(samples[name], 10),
            "peak": max(run["peak"] for run in printed[name]),
            "after": printed[name][-1]["after"],
        }
        for name in names
    ]


def main() -> None:
    from quantizers import quantizers

    args = arguments(__doc__, threads=2, rounds=3, layers=22, contenders="")
    parts = args.contenders.split(",")
    names = [name for name in quantizers() if any(part in name for part in parts)]
    rows = measure(names, args.rounds, args.threads, args.layers)
    record(args.json, "Quantizing a model", TEXT.format(threads=args.threads), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
