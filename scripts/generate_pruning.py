"""Write what pruning costs MiniLM, examples/minilm/pruning.json, into docs/pruning.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "pruning.md"
RESULTS = ROOT / "examples" / "minilm" / "pruning.json"
HEADER = ["removed", "method", "share", "SQNR", "cosine mean", "cosine min", "top-1", "agreement"]


def section(data: dict[str, Any]) -> str:
    """The table, and what was measured, where."""
    about = data["about"]
    text = (
        f"{about['date']}; {about['cpu']}; Python {about['python']}, torch {about['torch']}, ao-sparsity "
        f"{about['ao-sparsity']}. {about['pairs']} pairs of texts; methods saw {about['calibration_texts']} "
        f"other texts, of {about['calibration_tokens']} tokens."
    )
    return "\n\n".join([text, table(HEADER, list(map(line, data["rows"])))])


def line(row: dict[str, Any]) -> list[str]:
    """One variant."""
    decibels = row["output_sqnr_db"]
    return [
        row["budget"],
        row["method"],
        f"{100 * row['removed'] / row['weights']:.2f} %" if row["weights"] else "–",
        "–" if decibels is None else f"{decibels:.2f} dB",
        *(f"{row[name]:.4f}" for name in ("cosine_mean", "cosine_min")),
        *(f"{row[name]:.3f}" for name in ("accuracy", "agreement")),
    ]


if __name__ == "__main__":
    text = section(json.loads(RESULTS.read_text(encoding="utf-8")))
    sys.exit(main({(PAGE, "minilm"): text}, Path(__file__).name))
