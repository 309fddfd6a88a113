"""Measure what every recipe and format costs the byte-level model and MiniLM.

Prints tables in Markdown, which scripts/generate_quality.py writes into docs/quality.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bytelm import cases, data, evaluate, model
from bytelm.cases import Case
from bytelm.record import FIGURES
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from minilm_demo import minilm, results
from minilm_demo.corpus import docstring_pairs
from minilm_demo.metrics import quality as minilm_quality
from minilm_demo.results import Result, layers_of
from minilm_demo.variants import Variant, disk_bytes, quantized

from generate_quality import sections

#: of the checkpoint: bytes in a window, of which the second half is predicted
CONTEXT = json.loads((model.PRETRAINED / FIGURES).read_text(encoding="utf-8"))["measured"][
    "context"
]
#: where texts for MiniLM are cut, as in its demo
QUERY_TOKENS, DOCUMENT_TOKENS = 20, 24


def main() -> None:
    args = parse_args()
    chosen = [
        case
        for case in (*cases.recipes(), *cases.formats())
        if re.search(args.only, f"{case.table} {case.name}")
    ]
    windows, about = held_out(args.windows)
    rows, left_out = byte_model(model.load(), windows, tqdm(chosen, desc="byte model"))
    recipes = [case for case in chosen if case.table == "recipe"]
    found = {
        "about": about | {"pairs": args.pairs, "tokens": [QUERY_TOKENS, DOCUMENT_TOKENS]},
        "byte_model": rows,
        "left_out": left_out,
        "minilm": mini_model(args.pairs, tqdm(recipes, desc="MiniLM")),
    }
    if args.update:
        found = updated(json.loads(args.json.read_text(encoding="utf-8")), found, args.only)
    publish(found, sections(found), args.json)


def updated(old: dict[str, Any], new: dict[str, Any], only: str) -> dict[str, Any]:
    """The figures of an earlier run with those of cases measured now, and when and where both were.

    Raises:
        SystemExit: the two are of other texts, which cannot be compared.
    """
    for name in ("corpus", "windows", "context", "pairs", "tokens"):
        if old["about"][name] != new["about"][name]:
            raise SystemExit(f"error: {name} was {old['about'][name]}, and is {new['about'][name]}")
    run = {name: new["about"][name] for name in ("date", "cpu", "python", "torch", "ao-core")}
    about = old["about"] | {"updates": [*old["about"].get("updates", []), run | {"only": only}]}
    return {
        "about": about,
        "byte_model": _merged(old["byte_model"], new["byte_model"]),
        "left_out": old["left_out"] | new["left_out"],
        "minilm": _merged(old["minilm"], new["minilm"]),
    }


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with new ones in place of those of the same name; others that are new at the end."""
    keys = ("table", "name", "group", "scales")
    rows = {tuple(row.get(key) for key in keys): row for row in old}
    return list((rows | {tuple(row.get(key) for key in keys): row for row in new}).values())


def parse_args() -> argparse.Namespace:
    parser = arguments(__doc__, windows=128)
    parser.add_argument("--only", default="", help="names in which this regex is found")
    parser.add_argument(
        "--update", action="store_true", help="keep what is in the file of --json of other names"
    )
    parser.add_argument("--pairs", type=int, default=1000, help="texts for MiniLM (1000)")
    return parser.parse_args()


def arguments(doc: str | None, windows: int) -> argparse.ArgumentParser:
    """What a script that measures the byte model is asked: where to, and on how many windows."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument(
        "--windows", type=int, default=windows, help=f"of held-out text ({windows})"
    )
    return parser


def held_out(count: int) -> tuple[Tensor, dict[str, Any]]:
    """So many windows of held-out text, and where and on what is measured."""
    corpus = data.read_corpus()
    windows = data.spread(corpus.held_out, CONTEXT, count)
    about = {"corpus": corpus.about, "windows": len(windows), "context": CONTEXT}
    return windows, results.environment() | about


def publish(found: dict[str, Any], texts: dict[str, str], path: Path | None) -> None:
    """Write the figures into a file, if there is to be one, and print the tables."""
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, text in texts.items():
        print(f"## {name}\n\n{text}\n")


def byte_model(
    original: nn.Module, windows: Tensor, chosen: Iterable[Case]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for the original and each variant of it, and why others have none."""
    logits = predict(original, windows)
    rows = [{"table": "original", "name": "float32"} | _figures(logits, logits, windows)]
    left_out: dict[str, str] = {}
    for case in chosen:
        made = quantized(original, case.name, case.asked, "", lambda *_: None)
        if isinstance(made, Variant):
            about = {"table": case.table, "name": case.name}
            if case.table == "format":
                about |= {"group": case.group, "scales": case.scales}
            figures = _figures(logits, predict(made.model, windows), windows)
            rows.append(about | figures | _sizes(made))
        else:
            left_out[case.name] = made
    return rows, left_out


def predict(model: nn.Module, windows: Tensor) -> Tensor:
    """`evaluate.predict`, each thread on windows of its own, which is faster on a busy machine."""
    with minilm.threads() as pool:
        parts = list(pool.map(lambda part: evaluate.predict(model, part), windows.split(16)))
    return torch.cat(parts)


def _figures(original: Tensor, logits: Tensor, windows: Tensor) -> dict[str, float | None]:
    found = asdict(evaluate.quality(original, logits, windows))
    return {name: _rounded(value) for name, value in found.items()}


def _sizes(made: Variant) -> dict[str, float | None]:
    """Bits of a quantized weight, all included, and the median of the SQNR."""
    assert made.report is not None
    records = made.report.with_status("changed")
    weights = sum(torch.Size(record.shape).numel() for record in records)
    decibels = [record.sqnr_db for record in records if record.sqnr_db is not None]
    return {
        "bits": round(8 * sum(record.bytes_after for record in records) / weights, 3),
        "weight_sqnr_db": round(median(decibels), 2) if decibels else None,
    }


def mini_model(pairs: int, chosen: Iterable[Case]) -> list[dict[str, Any]]:
    """A row for MiniLM as it is and for each recipe that applies: what its demo says of quality."""
    original = minilm.load()
    texts = docstring_pairs(pairs)
    queries = minilm.tokenize([pair.query for pair in texts], QUERY_TOKENS)
    documents = minilm.tokenize([pair.document for pair in texts], DOCUMENT_TOKENS)

    def vectors(made: nn.Module) -> list[Tensor]:
        return [minilm.encode(made, batches) for batches in (queries, documents)]

    expected = vectors(original)
    rows = []
    for case in chain([None], chosen):
        made = Variant("float32", "", original)
        if case is not None:
            made = quantized(original, case.name, case.config, "", lambda *_: None)
        if isinstance(made, Variant):
            layers = layers_of(made.report) if made.report else []
            found = minilm_quality(*vectors(made.model), *expected)
            size = disk_bytes(made.model)
            result = Result(made.name, "", 0, size, found, layers, 0.0)
            figures = {"disk_bytes": size, "weight_sqnr_db": result.weight_sqnr_db} | asdict(found)
            rows.append({"name": made.name} | {k: _rounded(v) for k, v in figures.items()})
    return rows


def _rounded(value: float | None) -> float | None:
    """Six digits; None where there is no finite figure."""
    return None if value is None or math.isinf(value) else float(f"{value:.6g}")


if __name__ == "__main__":
    main()
