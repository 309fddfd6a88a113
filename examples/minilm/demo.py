"""Quantize a real model by every recipe that is installed, and compare what comes out.

The model is MiniLM, a sentence encoder of 22.7 million parameters. The task is retrieval: of 100
docstrings of the Python standard library, find the one that a first sentence belongs to.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from minilm_demo import minilm, page, results, table, variants
from minilm_demo.compare import Comparison, compare
from minilm_demo.corpus import docstring_pairs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from torch import nn

from ao_core import save_model

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 120)
    configs = {
        name: found for name, found in variants.configs().items() if re.search(args.recipes, name)
    }
    console.print(f"MiniLM, quantized in {len(configs)} ways. This takes about two minutes.")
    pairs = docstring_pairs(args.pairs)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        found = compare(
            pairs, (args.query_tokens, args.document_tokens), configs, args.seconds, progress
        )

    about = results.environment() | {
        "pairs": len(pairs),
        "query_tokens": args.query_tokens,
        "document_tokens": args.document_tokens,
    }
    show(found, about, console)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "report.json": results.to_json(found.results, found.left_out, about),
        "report.html": page.render(found.results, found.left_out, about),
    }.items():
        (args.out / name).write_text(text + "\n", encoding="utf-8")
    if variants.SAVED in found.models:
        reload_in_new_process(found.models[variants.SAVED], args.out / "checkpoint", console)
    console.print(f"Report: {args.out / 'report.html'} and report.json", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def show(found: Comparison, about: dict[str, Any], console: Console) -> None:
    """The tables, what they mean, and what they leave out."""
    console.print(table.sizes(found.results))
    for workload in found.results[0].latency:
        console.print(table.speeds(found.results, workload))
    for note in table.notes(found.results, about):
        console.print(f"- {note}", highlight=False)
    for name, reason in found.left_out.items():
        console.print(f"- left out: {name}: {reason}", highlight=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=100, help="texts to search (100)")
    # longer texts are cut, so that all recipes take minutes and not a quarter of an hour
    parser.add_argument("--query-tokens", type=int, default=20, help="cut queries there (20)")
    parser.add_argument("--document-tokens", type=int, default=24, help="cut documents there (24)")
    parser.add_argument("--recipes", default="", help="only those in which this regex is found")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "minilm", help="folder")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each latency (5)")
    return parser.parse_args()


def reload_in_new_process(model: nn.Module, checkpoint: Path, console: Console) -> None:
    """Save a variant, load it in a new process, and compare what both make of the same texts.

    Raises:
        SystemExit: one bit differs.
    """
    save_model(model, checkpoint)
    texts = ["One process quantizes a model and saves it.", "Another one loads it."]
    (batch,) = minilm.tokenize(texts, max_tokens=32)
    expected = minilm.embed(model, batch)
    with tempfile.TemporaryDirectory(prefix="minilm-") as folder:
        tokens, vectors = Path(folder) / "tokens.safetensors", Path(folder) / "vectors.safetensors"
        save_file({"ids": batch.ids, "mask": batch.mask, "rows": batch.rows}, tokens)
        script = Path(__file__).with_name("reload.py")
        subprocess.run([sys.executable, script, checkpoint, tokens, vectors], check=True)
        loaded = load_file(vectors)["vectors"]
    if not torch.equal(expected, loaded):
        worst = float((expected - loaded).abs().max())
        raise SystemExit(f"error: outputs differ by up to {worst:.3g} after loading {checkpoint}")
    console.print(
        f"{variants.SAVED!r}: saved to {checkpoint}, loaded in a new process: outputs are bit-equal",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
