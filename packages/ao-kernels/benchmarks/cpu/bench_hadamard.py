"""The Hadamard transform on the CPU: the kernel, plain torch, and the product with the dense matrix."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from ao_core import Call
from ao_core.ext.kernels import hadamard_spec, select
from ao_core.ext.numerics import hadamard_factors, hadamard_matrix, hadamard_transform
from benchmarking import Row, arguments, interleaved, paired, percentile, record

TEXT = """\
Rows of so many elements, one block each, {dtype}, {threads} threads, in alternate rounds. *orders*: the
factors of the matrix; *x dense*: the median over rounds of how many times as fast as `torch.matmul` with the
dense matrix in the same dtype, with its interval; *x torch*: the same beside the transform in plain torch."""


def rows_of(block: int, rows: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    """A row for each contender."""
    x = torch.randn(rows, block).to(dtype)
    kernel = select(
        Call("hadamard", hadamard_spec(block), (rows, block), (rows, block), dtype, "cpu")
    )
    assert kernel.name == "cpu_hadamard"
    # kept as it is multiplied: a row of ones and minus ones for each element of the output
    dense = (hadamard_matrix(block).to(dtype) / math.sqrt(block)).T
    contenders = {
        "dense": partial(torch.matmul, x, dense),
        "torch": partial(hadamard_transform, x, block),
        "ao-kernels": partial(kernel.fn, x, block, False),
    }
    samples = interleaved(contenders, rounds=rounds, repeats=max(1, 2**16 // (rows * block)))
    return [
        {
            "elements": block,
            "orders": " × ".join(map(str, hadamard_factors(block))),
            "rows": rows,
            "contender": name,
            "p10 µs": 1e6 * percentile(seconds, 10),
            "median µs": 1e6 * percentile(seconds, 50),
            "x dense": (dense_ratio := paired(samples, name, "dense")).median,
            "dense 95 %": dense_ratio.interval(),
            "x torch": (torch_ratio := paired(samples, name, "torch")).median,
            "torch 95 %": torch_ratio.interval(),
        }
        for name, seconds in samples.items()
    ]


def main() -> None:
    args = arguments(
        __doc__, sizes="128,4096,11008", rows="1,256", dtype="bfloat16", threads=2, rounds=20
    )
    torch.set_num_threads(args.threads)
    found: list[Row] = []
    with torch.inference_mode():
        for block in map(int, args.sizes.split(",")):
            for rows in map(int, args.rows.split(",")):
                found += rows_of(block, rows, getattr(torch, args.dtype), args.rounds)
    text = TEXT.format(dtype=args.dtype, threads=args.threads)
    record(args.json, "Hadamard transforms on the CPU", text, found)


if __name__ == "__main__":
    main()
