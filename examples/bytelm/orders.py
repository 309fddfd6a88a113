"""Measure what the size of groups costs the byte-level model in several orders of its columns.

Every format, way to choose scales and group size gets the same orders, so that differences between
two of them are paired. Prints tables in Markdown, which scripts/generate_quality.py writes into
docs/quality.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bytelm import cases, data, evaluate, model
from bytelm.cases import Case
from bytelm.orders import reordered
from quality import CONTEXT
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from minilm_demo.results import environment

from ao_core import quantize_
from generate_quality import order_sections


def main() -> None:
    args = parse_args()
    chosen = [case for case in cases.formats() if case.name in args.formats]
    corpus = data.read_corpus()
    windows = data.spread(corpus.held_out, CONTEXT, args.windows)
    found = {
        "about": environment()
        | {"corpus": corpus.about, "windows": len(windows), "context": CONTEXT}
        | {"seeds": args.seeds},
        "rows": measure(model.load(), windows, chosen, args.seeds),
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, text in order_sections(found).items():
        print(f"## {name}\n\n{text}\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--formats", nargs="+", default=["int4", "int3", "int2"])
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=list(range(6)), help="of the orders"
    )
    parser.add_argument("--windows", type=int, default=32, help="of held-out text (32)")
    return parser.parse_args()


def measure(
    original: nn.Module, windows: Tensor, chosen: Sequence[Case], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for each case: its KL in bits with the columns as they are, and in each random order."""
    logits = evaluate.predict(original, windows)

    def kl_bits(job: tuple[Case, int | None]) -> float:
        case, seed = job
        made = copy.deepcopy(original) if seed is None else reordered(original, seed)
        quantize_(made, case.config)
        found = evaluate.kl_bits(logits, evaluate.predict(made, windows)).mean()
        return float(f"{float(found):.6g}")

    orders = (None, *seeds)
    jobs = [(case, seed) for case in chosen for seed in orders]
    threads = torch.get_num_threads()
    # each thread takes an order of its own, for a search has work for one core only
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = list(tqdm(pool.map(kl_bits, jobs), desc="orders", total=len(jobs)))
    torch.set_num_threads(threads)
    parts = (found[start : start + len(orders)] for start in range(0, len(jobs), len(orders)))
    return [
        {"name": case.name, "scales": case.scales, "group": case.group}
        | {"natural": natural, "orders": random}
        for case, (natural, *random) in zip(chosen, parts, strict=True)
    ]


if __name__ == "__main__":
    main()
