"""Measure what every recipe and format costs the byte-level model and MiniLM, into a JSON file."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bytelm import data, evaluate, model, variants
from bytelm.variants import Case, Variant
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo import minilm, results
from minilm_demo import variants as minilm_variants
from minilm_demo.corpus import docstring_pairs
from minilm_demo.metrics import quality as minilm_quality
from minilm_demo.results import layers_of

RECORDED = Path(__file__).with_name("quality.json")
#: bytes in a window; the second half is predicted
CONTEXT = 512
#: where texts for MiniLM are cut, as in its demo
QUERY_TOKENS, DOCUMENT_TOKENS = 20, 24


def main() -> None:
    args = parse_args()
    cases = [
        case
        for case in (*variants.recipes(), *variants.formats())
        if re.search(args.only, f"{case.table} {case.name}")
    ]
    corpus = data.read_corpus()
    windows = data.spread(corpus.held_out, CONTEXT, args.windows)
    rows, left_out = byte_model(model.load(), windows, tqdm(cases, desc="byte model"))
    recipes = [case for case in cases if case.table == "recipe"]
    found = {
        "about": results.environment()
        | {"corpus": corpus.about, "windows": len(windows), "context": CONTEXT}
        | {"pairs": args.pairs, "tokens": [QUERY_TOKENS, DOCUMENT_TOKENS]},
        "byte_model": rows,
        "left_out": left_out,
        "minilm": mini_model(args.pairs, tqdm(recipes, desc="MiniLM")),
    }
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RECORDED, help="where the figures go")
    parser.add_argument("--only", default="", help="names in which this regex is found")
    parser.add_argument("--windows", type=int, default=128, help="of 512 held-out bytes (128)")
    parser.add_argument("--pairs", type=int, default=1000, help="texts for MiniLM (1000)")
    return parser.parse_args()


def byte_model(
    original: nn.Module, windows: Tensor, cases: Iterable[Case]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for the original and each variant of it, and why others have none."""
    logits = predict(original, windows)
    rows = [{"table": "original", "name": "float32"} | _figures(logits, logits, windows)]
    left_out: dict[str, str] = {}
    for case in cases:
        made = variants.quantized(original, case.config)
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
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(lambda part: evaluate.predict(model, part), windows.split(16)))
    torch.set_num_threads(threads)
    return torch.cat(parts)


def _figures(original: Tensor, logits: Tensor, windows: Tensor) -> dict[str, float]:
    found = asdict(evaluate.quality(original, logits, windows))
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def _sizes(made: Variant) -> dict[str, float | None]:
    """Bits of a quantized weight, all included, and the median of the SQNR."""
    records = made.report.with_status("quantized")
    weights = sum(torch.Size(record.shape).numel() for record in records)
    decibels = [record.sqnr_db for record in records if record.sqnr_db is not None]
    return {
        "bits": round(8 * sum(record.bytes_after for record in records) / weights, 3),
        "weight_sqnr_db": round(median(decibels), 2) if decibels else None,
    }


def mini_model(pairs: int, cases: Iterable[Case]) -> list[dict[str, Any]]:
    """A row for MiniLM as it is and for each recipe that applies: what its demo says of quality."""
    original = minilm.load()
    texts = docstring_pairs(pairs)
    queries = minilm.tokenize([pair.query for pair in texts], QUERY_TOKENS)
    documents = minilm.tokenize([pair.document for pair in texts], DOCUMENT_TOKENS)
    vectors = [minilm.encode(original, batches) for batches in (queries, documents)]

    def row(name: str, made: nn.Module) -> dict[str, Any]:
        found = [minilm.encode(made, batches) for batches in (queries, documents)]
        figures = asdict(minilm_quality(*found, *vectors))
        disk = minilm_variants.disk_bytes(made)
        return {"name": name, "disk_bytes": disk} | {k: _finite(v) for k, v in figures.items()}

    rows = [row("float32", original)]
    for case in cases:
        made = variants.quantized(original, case.config)
        if isinstance(made, Variant):
            decibels = [x.sqnr_db for x in layers_of(made.report) if x.sqnr_db is not None]
            rows.append(row(case.name, made.model) | {"weight_sqnr_db": median(decibels)})
    return rows


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if abs(value) < float("inf") else None


if __name__ == "__main__":
    main()
