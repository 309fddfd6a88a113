"""Linear layers in every weight format at 1 to 256 rows, beside torch and whichever peers are there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from linear import ROUNDS, SHAPES, cases, makers, rows_of
from llama import version
from reader import READER
from rotation import ROTATED

from benchmarking import Row, arguments, cell, record

TEXT = """\
`F.linear` of (M, K) with a weight (N, K) in {threads} threads. Contenders take turns in shuffled rounds of
one process, each on copies of its weight that exceed {rotated} MiB together and differ in every page, after
a call that is not timed. Times are 10th percentiles in µs; in brackets, how many times as fast as the dense
matmul of the same dtype. *share of read*: the weight's bytes with its scales, over what a C loop in the same
threads and the same rounds reads in that time: of the codes of the same copies, or of pieces of 192 MiB."""


def numbers(text: str) -> list[int]:
    """1,4 → [1, 4]; 4096x4096 → [4096, 4096]."""
    return [int(part) for part in text.replace("x", ",").split(",")]


def page(rows: Sequence[Row]) -> list[Row]:
    """A line for each shape and contender, with the numbers of rows as columns."""
    counts = list(dict.fromkeys(row["M"] for row in rows))
    lines: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["contender"] == READER:
            continue
        empty = {"K × N": row["K × N"], "contender": row["contender"], "MiB": row["MiB"]}
        empty |= {"share of read, M = 1": ""} | {f"M = {m}": "" for m in counts}
        line = lines.setdefault((row["K × N"], row["contender"]), empty)
        ratio = f" ({row['× F.linear']:.2f})" if row["× F.linear"] else ""
        line[f"M = {row['M']}"] = cell(row["p10"]) + ratio
        if row["M"] == 1:
            line["share of read, M = 1"] = f"{row['share of read']:.2f}"
    return list(lines.values())


def main() -> None:
    args = arguments(
        __doc__,
        threads=2,
        percent=100,  # of the usual rounds
        m=",".join(map(str, ROUNDS)),
        shapes=",".join(f"{k}x{n}" for k, n in SHAPES),
        formats="",
        llama="",
    )
    torch.set_num_threads(args.threads)
    found = makers(args.llama)
    parts = args.formats.split(",")
    chosen = [make for name, make in found.items() if any(part in name for part in parts)]
    shapes = [(k, n) for k, n in (numbers(text) for text in args.shapes.split(","))]
    rounds = {m: max(1, ROUNDS.get(m, 12) * args.percent // 100) for m in numbers(args.m)}
    rows = []
    with torch.inference_mode():
        for case in cases(chosen, shapes, rounds):
            rows += rows_of(case)
    text = TEXT.format(threads=args.threads, rotated=ROTATED >> 20)
    versions = version(args.llama)
    record(args.json, "Linear layers on the CPU", text, rows, page=page(rows), versions=versions)


if __name__ == "__main__":
    main()
