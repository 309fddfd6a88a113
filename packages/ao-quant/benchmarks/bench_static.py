"""Int8 layers whose activations have static and dynamic scales, beside the dense layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from ao_core import explain, quantize_
from ao_quant import Int8StaticActivationInt8WeightConfig
from benchmarking import Row, arguments, interleaved, paired, record

DENSE, STATIC, DYNAMIC, PLAIN = "dense", "static", "dynamic", "dynamic, plain"
SIZE = 1024

TEXT = f"""\
A linear layer of {SIZE}×{SIZE} in the dtype of its activations, on one thread. *dynamic* is the recipe
`int8_dynamic_activation_int8_weight` with its best kernel here, *dynamic, plain* the same weight in the
layout that the static one has, whose kernel finds scales before the matmul. *× dense*, the median of the
ratios within rounds with its interval, is faster below 1."""


def layers(dtype: torch.dtype) -> dict[str, nn.Linear]:
    """The contenders."""

    def layer() -> nn.Linear:
        return nn.Linear(SIZE, SIZE, bias=False, dtype=dtype).requires_grad_(False)

    found = {name: layer() for name in (DENSE, STATIC, DYNAMIC, PLAIN)}
    quantize_(found[STATIC], Int8StaticActivationInt8WeightConfig(act_scale=0.03))
    for name in (DYNAMIC, PLAIN):
        quantize_(found[name], "int8_dynamic_activation_int8_weight")
    weight = found[PLAIN].weight.canonical()  # type: ignore[operator]
    found[PLAIN].weight = nn.Parameter(weight, requires_grad=False)
    return found


def measure(rounds: int) -> list[Row]:
    """One row for each number of tokens, dtype and contender."""
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        contenders = layers(dtype)
        for tokens in (1, 32, 256):
            x = torch.randn(tokens, SIZE).to(dtype)
            calls: dict[str, Callable[[], object]] = {
                name: partial(layer, x) for name, layer in contenders.items()
            }
            samples = interleaved(calls, rounds=rounds, repeats=max(1, 64 // tokens))
            for name, layer in contenders.items():
                times = paired(samples, DENSE, name)  # as long
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "tokens": tokens,
                        "layer": name,
                        "kernel": "" if name == DENSE else _kernel(layer, x),
                        "µs": median(samples[name]) * 1e6,
                        "× dense": times.median,
                        "95 %": times.interval(),
                    }
                )
    return rows


def _kernel(layer: nn.Linear, x: torch.Tensor) -> str:
    (weight,) = explain(layer, x)
    winner = weight.calls[0].winner
    return "" if winner is None else winner.kernel.name


if __name__ == "__main__":
    args = arguments(__doc__, rounds=20)
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = measure(args.rounds)
    record(args.json, "Static and dynamic scales of activations", TEXT, rows)
