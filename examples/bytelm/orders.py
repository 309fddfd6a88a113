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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bytelm import cases, data, evaluate, model
from bytelm.cases import Case
from bytelm.orders import reordered
from quality import CONTEXT, predict
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
        "rows": measure(model.load(), windows, tqdm(chosen, desc="orders"), args.seeds),
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
    original: nn.Module, windows: Tensor, chosen: Iterable[Case], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for each case: its KL in bits with the columns as they are, and in each random order."""
    logits = predict(original, windows)

    def kl_bits(dense: nn.Module, case: Case) -> float:
        quantize_(dense, case.config)
        found = evaluate.kl_bits(logits, predict(dense, windows)).mean()
        return float(f"{float(found):.6g}")

    return [
        {"name": case.name, "scales": case.scales, "group": case.group}
        | {"natural": kl_bits(copy.deepcopy(original), case)}
        | {"orders": [kl_bits(reordered(original, seed), case) for seed in seeds]}
        for case in chosen
    ]


if __name__ == "__main__":
    main()
