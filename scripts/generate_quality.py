"""Write what recipes and formats cost real models into docs/quality.md.

Reads examples/bytelm/quality.json, orders.json beside it: what groups cost in several orders of the
columns, and examples/smollm2/quality.json. With --check nothing is written, and the exit status says
whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "quality.md"
RESULTS = ROOT / "examples" / "bytelm" / "quality.json"
ORDERS = RESULTS.with_name("orders.json")
SMOLLM2 = ROOT / "examples" / "smollm2" / "quality.json"
#: measure -> heading, and decimals
MEASURES = {
    "kl_bits": ("KL, bits", 5),
    "bits_per_byte": ("bits per byte", 4),
    "agreement": ("top-1 agreement", 4),
}

Row = dict[str, Any]


def sections(data: dict[str, Any]) -> dict[str, str]:
    """Name of a section of the page -> its Markdown."""
    rows = data["byte_model"]
    formats = [row for row in rows if row["table"] == "format"]
    return {
        "measured": about(data["about"]),
        "recipes": recipes(rows, data["left_out"]),
        **{f"formats {name}": by_group(formats, name) for name in MEASURES},
        "minilm": minilm(data["minilm"]),
    }


def order_sections(data: dict[str, Any]) -> dict[str, str]:
    """The same of what groups cost over several orders of the columns."""
    seeds = ", ".join(map(str, data["about"]["seeds"]))
    measured = f"{byte_model(data['about'])} Random orders of the seeds {seeds}."
    return {"orders measured": measured, "orders": orders(data["rows"])}


def about(found: dict[str, Any]) -> str:
    """What was measured, where."""
    text = f"{byte_model(found)} MiniLM: {found['pairs']} pairs of texts."
    for run in found.get("updates", ()):
        text += (
            f" What matches `{run['only']}` was measured {run['date']}; {run['cpu']}; "
            f"Python {run['python']}, torch {run['torch']}, ao-core {run['ao-core']}."
        )
    return text


def byte_model(found: dict[str, Any]) -> str:
    """Where the byte model was measured, and on what."""
    corpus = found["corpus"]
    positions = found["windows"] * found["context"] // 2
    return (
        f"{found['date']}; {found['cpu']}; Python {found['python']}, torch {found['torch']}, ao-core "
        f"{found['ao-core']}. Byte model: {positions} bytes, in windows of {found['context']}, of the "
        f"{corpus['held_out_bytes']} in "
        f"{corpus['held_out_files']} files of the standard library of Python {corpus['python']} that "
        "were held out from training."
    )


def recipes(rows: list[Row], left_out: dict[str, str]) -> str:
    """The original and every recipe, and why some are not there."""
    shown = [row for row in rows if row["table"] in ("original", "recipe")]
    header = ["recipe", "bits per weight", *(name for name, _ in MEASURES.values()), "weight dB"]
    lines = [
        [
            code(row),
            number(row.get("bits"), 3),
            *(number(row[name], decimals) for name, (_, decimals) in MEASURES.items()),
            number(row.get("weight_sqnr_db"), 1),
        ]
        for row in shown
    ]
    notes = [f"- `{name}`: {reason}." for name, reason in left_out.items()]
    return "\n\n".join([table(header, lines), *(["Left out:", "\n".join(notes)] if notes else [])])


def by_group(rows: list[Row], measure: str) -> str:
    """One measure of every format: a row for each way to choose scales, a column a group size."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    kinds = dict.fromkeys((row["name"], row["scales"]) for row in rows)
    found = {(row["name"], row["scales"], row["group"]): row[measure] for row in rows}
    lines = [
        [
            f"`{name}`",
            scales,
            *(number(found.get((name, scales, group)), MEASURES[measure][1]) for group in groups),
        ]
        for name, scales in kinds
    ]
    names = [group if isinstance(group, str) else f"groups of {group}" for group in groups]
    return table(["format", "scales", *names], lines)


def orders(rows: list[Row]) -> str:
    """KL by group size, and what larger groups add to it, in the natural order and in random ones."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    found = {(row["name"], row["scales"], row["group"]): row for row in rows}
    steps = [f"{large} over {small}" for small, large in pairwise(groups)]
    lines = []
    reversals: dict[str, list[str]] = {"natural": [], "orders": []}
    for name, scales in dict.fromkeys((row["name"], row["scales"]) for row in rows):
        for order in reversals:
            costs = [listed(found[name, scales, group][order]) for group in groups]
            added = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(costs)]
            title = [f"`{name}`", scales, "natural" if order == "natural" else "random"]
            lines.append([*title, *map(average, costs), *map(difference, added)])
            reversals[order] += [
                f"`{name}` {scales}, {step} ({difference(by)})"
                for step, by in zip(steps, added, strict=True)
                if mean(by) <= 0
            ]
    names = [group if isinstance(group, str) else f"groups of {group}" for group in groups]
    comparisons = len(lines) // 2 * len(steps)
    notes = [
        f"- {where}, {len(cells)} of {comparisons}" + "".join(f"; {cell}" for cell in cells)
        for where, cells in zip(
            ("in the natural order", "in the mean over the random orders"),
            reversals.values(),
            strict=True,
        )
    ]
    return "\n\n".join(
        [
            table(["format", "scales", "order", *names, *steps], lines),
            "Where larger groups are as good or better:",
            "\n".join(notes),
        ]
    )


def smollm2_sections(data: dict[str, Any]) -> dict[str, str]:
    """The same of what recipes cost SmolLM2, the best first."""
    found = data["about"]
    measured = (
        f"{found['date']}; {found['cpu']}; Python {found['python']}, torch {found['torch']}, ao-core "
        f"{found['ao-core']}. {found['model']}: {found['tokens']} tokens of English, in windows of "
        f"{found['context']}."
    )
    header = ["recipe", "MB", "KL, nats", "bits per token", "top-1 agreement", "seconds"]
    lines = [
        [
            code(row),
            number(row["bytes"] / 1e6, 1),
            number(row["kl_nats"], 4),
            number(row["bits_per_token"], 3),
            number(row["agreement"], 3),
            number(row["seconds"], 1),
        ]
        for row in sorted(data["rows"], key=lambda row: row["kl_nats"])
    ]
    return {"smollm2 measured": measured, "smollm2": table(header, lines)}


def listed(value: float | list[float]) -> list[float]:
    """One figure as a list of one."""
    return value if isinstance(value, list) else [value]


def average(values: Sequence[float], sign: str = "") -> str:
    """The mean, and its standard error where there are several."""
    error = f" ± {stdev(values) / sqrt(len(values)):.5f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.5f}{error}"


def difference(values: Sequence[float]) -> str:
    """The same of differences, and in how many orders they are positive."""
    count = f", {sum(value > 0 for value in values)} of {len(values)}" if len(values) > 1 else ""
    return average(values, "+") + count


def minilm(rows: list[Row]) -> str:
    """The table of the MiniLM demo."""
    header = ["recipe", "disk MB", "weight dB", "output dB", "cosine mean", "cosine min", "top-1"]
    lines = [
        [
            code(row),
            number(row["disk_bytes"] / 1e6, 1),
            number(row.get("weight_sqnr_db"), 1),
            number(row["output_sqnr_db"], 1),
            number(row["cosine_mean"], 4),
            number(row["cosine_min"], 4),
            number(row["accuracy"], 3),
            number(row["agreement"], 3),
        ]
        for row in rows
    ]
    return table([*header, "as float32"], lines)


def code(row: Row) -> str:
    """The name of a row."""
    return row["name"] if row["name"] == "float32" else f"`{row['name']}`"


def number(value: float | None, decimals: int) -> str:
    """Fixed decimals; a dash where there is no figure."""
    return "–" if value is None else f"{value:.{decimals}f}"


if __name__ == "__main__":
    texts = sections(json.loads(RESULTS.read_text(encoding="utf-8")))
    texts |= order_sections(json.loads(ORDERS.read_text(encoding="utf-8")))
    texts |= smollm2_sections(json.loads(SMOLLM2.read_text(encoding="utf-8")))
    sys.exit(main({(PAGE, name): text for name, text in texts.items()}, Path(__file__).name))
