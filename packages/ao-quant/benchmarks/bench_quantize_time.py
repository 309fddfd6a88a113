"""Seconds and peak memory of quantize_ on a stack of linear layers, each time in a fresh process."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, arguments, in_fresh_processes, paired, percentile, record
from process_memory import peak, reset_peak, resident

RECIPES = (
    "int8_weight_only",
    "int4_weight_only",
    "nf4_weight_only",
    "float8_weight_only",
)
#: not a recipe: copy every weight once, the least that any of them must do
COPY = "copy"

TEXT = """\
`quantize_` on a stack of bfloat16 linear layers of {size}×{size}, each time in a fresh process, in alternate
rounds. *peak over model* is the process's greatest resident memory during `quantize_` beyond what it had
with the model loaded; *after* is what the quantized weights hold. *× copy* compares with copying every
weight once: the median of the ratios within rounds, with its interval."""


def child(recipe: str, parameters: int, size: int) -> None:
    """Quantize once and print seconds and bytes as JSON."""
    import torch
    from torch import nn

    from ao_core import quantize_
    from ao_core.ext import registry

    count = max(1, round(parameters / size**2))
    first = torch.empty(size, size, dtype=torch.bfloat16).normal_(std=1 / math.sqrt(size))
    model = nn.Sequential(*(nn.Linear(size, size, bias=False, device="meta") for _ in range(count)))
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(first.roll(number, dims=0), requires_grad=False)
    dense = sum(p.nbytes for p in model.parameters())
    registry.recipes.names()  # plugins are loaded once, whatever is quantized
    before = resident()
    reset_peak()
    start = time.perf_counter()
    if recipe == COPY:
        copies = (p.clone() for p in model.parameters())  # one at a time
        after = sum(copy.nbytes for copy in copies)
    else:
        after = quantize_(model, recipe).bytes_after
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "dense": dense, "after": after, "peak": peak() - before}))


def measure(rounds: int, parameters: int, size: int) -> list[Row]:
    """One row for each recipe, and for the copy."""
    names = (COPY, *RECIPES)
    samples, printed = in_fresh_processes(__file__, names, rounds, parameters, size)
    last = {name: runs[-1] for name, runs in printed.items()}
    times = {name: paired(samples, COPY, name) for name in names}  # as long
    return [
        {
            "recipe": name,
            "parameters, 10⁹": last[name]["dense"] / 2e9,
            "seconds": median(samples[name]),
            "p10": percentile(samples[name], 10),
            "× copy": times[name].median,
            "95 %": times[name].interval(),
            "model GB": last[name]["dense"] / 1e9,
            "after GB": last[name]["after"] / 1e9,
            "peak over model GB": max(run["peak"] for run in printed[name]) / 1e9,
        }
        for name in names
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        args = arguments(__doc__, rounds=3, parameters=1_000_000_000, size=4096)
        rows = measure(args.rounds, args.parameters, args.size)
        record(args.json, "Time and memory of quantize_", TEXT.format(size=args.size), rows)
