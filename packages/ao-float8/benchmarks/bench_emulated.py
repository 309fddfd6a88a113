"""A step of training in emulated low precision, compared with one in bfloat16."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from ao_core import quantize_
from ao_float8 import EmulationWarning
from benchmarking import Row, arguments, interleaved, paired, percentile, record

TEXT = """\
Forward and backward pass of two linear layers of {width} × {hidden} with a SiLU between them, {tokens}
tokens, bfloat16, {threads} threads, in alternate rounds. *× bf16*: the median over rounds of how many times
as long as without a recipe, with its interval. No CPU multiplies in these formats: operands are rounded, and
multiplied in bfloat16 or float32."""

RECIPES = (
    "float8/tensorwise", "float8/rowwise", "float8/blockwise", "float8/mxfp8", "mx_training/mxfp4",
    "nvfp4_training",
)  # fmt: skip


def step_of(recipe: str, width: int, hidden: int, tokens: int) -> Callable[[], object]:
    """A step of a model of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width, bias=False)
    ).bfloat16()
    x = torch.randn(tokens, width).bfloat16()
    if recipe:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)
            quantize_(model, recipe)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return step


def main() -> None:
    args = arguments(__doc__, width=2048, hidden=5632, tokens=512, threads=2, rounds=12)
    torch.set_num_threads(args.threads)
    sizes = args.width, args.hidden, args.tokens
    contenders = {"bfloat16": step_of("", *sizes)}
    contenders |= {recipe: step_of(recipe, *sizes) for recipe in RECIPES}
    samples = interleaved(contenders, rounds=args.rounds)
    rows: list[Row] = []
    for name, seconds in samples.items():
        ratio = paired(samples, "bfloat16", name)
        rows.append(
            {
                "recipe": name,
                "p10 ms": 1e3 * percentile(seconds, 10),
                "median ms": 1e3 * percentile(seconds, 50),
                "× bf16": ratio.median,
                "95 %": ratio.interval(),
            }
        )
    text = TEXT.format(
        width=args.width, hidden=args.hidden, tokens=args.tokens, threads=args.threads
    )
    record(args.json, "Training in emulated low precision", text, rows)


if __name__ == "__main__":
    main()
