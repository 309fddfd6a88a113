"""Nanoseconds per weight of `quantize_` with searched scales, next to absmax, in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from ao_core import Config, quantize_
from ao_quant import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from benchmarking import Row, arguments, interleaved, paired, record

METHODS = ("absmax", "mse", "hqq")
FORMATS: dict[str, Callable[[str], Config]] = {
    "int4, groups of 32 with zero points": lambda scales: Int4WeightOnlyConfig(
        32, scale_method=scales
    ),
    "int4, groups of 128": lambda scales: Int4WeightOnlyConfig(
        128, symmetric=True, scale_method=scales
    ),
    "int3, groups of 32 with zero points": lambda scales: IntxWeightOnlyConfig(
        3, 32, scale_method=scales
    ),
    "int8, rows": lambda scales: Int8WeightOnlyConfig(scale_method=scales),
}

TEXT = """\
`quantize_` of a bfloat16 linear layer of {rows}×{columns} with scale methods in alternate rounds, one thread.
*× absmax* is the median of the ratios within rounds, with its interval."""


def measure(rounds: int, rows: int, columns: int) -> list[Row]:
    """One row for each format and method."""
    torch.set_num_threads(1)
    weight = torch.randn(rows, columns, dtype=torch.bfloat16)
    found: list[Row] = []
    for name, make in FORMATS.items():

        def quantized(config: Config) -> None:
            layer = nn.Linear(columns, rows, bias=False, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            quantize_(layer, config)

        calls = {scales: partial(quantized, make(scales)) for scales in METHODS}
        samples = interleaved(calls, rounds=rounds)
        for scales in METHODS:
            ratio = paired(samples, "absmax", scales)  # as long
            found.append(
                {
                    "format": name,
                    "scales": scales,
                    "ns per weight": 1e9 * median(samples[scales]) / (rows * columns),
                    "× absmax": ratio.median,
                    "95 %": ratio.interval(),
                }
            )
    return found


if __name__ == "__main__":
    args = arguments(__doc__, rounds=7, rows=1024, columns=1536)
    record(
        args.json,
        "Time of searched scales",
        TEXT.format(rows=args.rows, columns=args.columns),
        measure(args.rounds, args.rows, args.columns),
    )
