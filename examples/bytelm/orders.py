"""Measure what the size of groups costs the byte-level model in several orders of its columns.

Every format, way to choose scales and group size gets the same orders, so that differences between
two of them are paired. Prints tables in Markdown, which scripts/generate_quality.py writes into
docs/quality.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytelm import cases, evaluate, model
from bytelm.cases import Case
from bytelm.orders import reordered
from quality import arguments, held_out, publish
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from minilm_demo import minilm

from ao_core import quantize_
from generate_quality import order_sections


def main() -> None:
    args = parse_args()
    chosen = [case for case in cases.formats() if case.name in args.formats]
    windows, about = held_out(args.windows)
    rows = measure(model.load(), windows, chosen, args.seeds)
    found = {"about": about | {"seeds": args.seeds}, "rows": rows}
    publish(found, order_sections(found), args.json)


def parse_args() -> argparse.Namespace:
    parser = arguments(__doc__, windows=32)
    parser.add_argument("--formats", nargs="+", default=["int4", "int3", "int2"])
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=list(range(6)), help="of the orders"
    )
    return parser.parse_args()


def measure(
    original: nn.Module, windows: Tensor, chosen: Sequence[Case], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for each case: its KL in bits with the columns as they are, and in each random order."""
    logits = evaluate.predict(original, windows)

    def kl_bits(job: tuple[Case, int | None]) -> float:
        case, seed = job
        made = copy.deepcopy(original) if seed is None else reordered(original, seed)
        quantize_(made, case.asked)
        found = evaluate.kl_bits(logits, evaluate.predict(made, windows)).mean()
        return float(f"{float(found):.6g}")

    orders = (None, *seeds)
    jobs = [(case, seed) for case in chosen for seed in orders]
    # each thread takes an order of its own, for a search has work for one core only
    with minilm.threads() as pool:
        found = list(tqdm(pool.map(kl_bits, jobs), desc="orders", total=len(jobs)))
    parts = (found[start : start + len(orders)] for start in range(0, len(jobs), len(orders)))
    return [
        {"name": case.name, "scales": case.scales, "group": case.group}
        | {"natural": natural, "orders": random}
        for case, (natural, *random) in zip(chosen, parts, strict=True)
    ]


if __name__ == "__main__":
    main()
