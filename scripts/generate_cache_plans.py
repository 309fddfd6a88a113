"""Write what plans of the cache of SmolLM2 lose on unseen text into docs/hf/kv-cache.md.

Reads examples/smollm2/cache_plan.json. With --check nothing is written, and the exit status says whether the
page is fresh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_sections import main, table
from workspace import ROOT

FIGURES = ROOT / "examples" / "smollm2" / "cache_plan.json"
PAGE = ROOT / "docs" / "hf" / "kv-cache.md"

Row = dict[str, Any]


def nats(row: Row | None) -> str:
    """A loss with its standard error, and what it is of."""
    if row is None:
        return "–"
    name = f"`{row['recipe']}`: " if "recipe" in row else ""
    return f"{name}{row['kl_nats']:.2g} ± {row['kl_error']:.1g}"


def fitting(rows: list[Row], plan: Row) -> Row | None:
    """The recipe for all layers that fits the budget and loses least."""
    fits = [row for row in rows if row["bits"] <= plan["budget"]]
    return min(fits, key=lambda row: float(row["kl_nats"]), default=None)


def larger(rows: list[Row], plan: Row) -> Row | None:
    """The smallest recipe for all layers that takes more."""
    more = [row for row in rows if row["bits"] > plan["budget"]]
    return min(more, key=lambda row: float(row["bits"]), default=None)


def plans(data: Row) -> str:
    """A row for each budget."""
    lines = []
    for row in data["plans"]:
        other = fitting(data["uniform"], row)
        ratio = "–" if other is None else f"{row['kl_nats'] / other['kl_nats']:.2f}"
        layers = [row["layers"].count(name) for name in dict.fromkeys(row["layers"])]
        names = [
            f"{n} `{name or 'exact'}`"
            for name, n in zip(dict.fromkeys(row["layers"]), layers, strict=True)
        ]
        lines.append(
            [
                f"{row['budget']:g}",
                f"{row['bytes_per_token']:g}",
                ", ".join(names),
                nats(row),
                nats(other),
                ratio,
                nats(larger(data["uniform"], row)),
                f"{row['agreement']:.3f}",
            ]
        )
    header = [
        "bits",
        "bytes per token",
        "layers",
        "plan: KL, nats",
        "same budget",
        "plan ÷ that",
        "next",
    ]
    about, held_out, given = data["about"], data["held_out"], data["data"]
    seconds = [row["processor_seconds"] for row in data["plans"]]
    note = (
        f"Plans are made of {given['windows']} windows of {given['tokens']} tokens of Python's "
        f"documentation, and measured on {held_out['windows']} others of {held_out['tokens']:,} (± is the "
        f"standard error over these). The first took {seconds[0]:.0f} s of the processor, each other budget "
        f"{max(seconds[1:]):.0f} s at most. {about['date']}; {about['cpu']}, "
        f"{about['threads']} thread(s); torch {about['versions']['torch']}."
    )
    return f"{table([*header, 'same likeliest token'], lines)}\n\n{note}"


if __name__ == "__main__":
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    sys.exit(main({(PAGE, "cache plans"): plans(figures)}, Path(__file__).name))
