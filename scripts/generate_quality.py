"""Write what recipes and formats cost real models, examples/bytelm/quality.json, into docs/quality.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "quality.md"
RESULTS = ROOT / "examples" / "bytelm" / "quality.json"
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


def about(found: dict[str, Any]) -> str:
    """What was measured, where."""
    corpus = found["corpus"]
    positions = found["windows"] * found["context"] // 2
    return (
        f"{found['date']}; {found['cpu']}; Python {found['python']}, torch {found['torch']}, ao-core "
        f"{found['ao-core']}. Byte model: {positions} bytes, in windows of {found['context']}, of the "
        f"{corpus['held_out_bytes']} in "
        f"{corpus['held_out_files']} files of the standard library of Python {corpus['python']} that "
        f"were held out from training. MiniLM: {found['pairs']} pairs of texts."
    )


def recipes(rows: list[Row], left_out: dict[str, str]) -> str:
    """The original and every recipe, and why some are not there."""
    shown = [row for row in rows if row["table"] in ("original", "recipe")]
    header = ["recipe", "bits a weight", *(name for name, _ in MEASURES.values()), "weight dB"]
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
    sys.exit(main({(PAGE, name): text for name, text in texts.items()}, Path(__file__).name))
