"""Write what static scales cost SmolLM2, examples/smollm2/static.json, into docs/calibration.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "calibration.md"
RESULTS = ROOT / "examples" / "smollm2" / "static.json"
HEADER = [
    "both operands in",
    "scales of activations",
    "KL, nats",
    "× dynamic",
    "same token",
    "static weights",
]


def section(data: dict[str, Any]) -> str:
    """The table, and what was measured, where."""
    about = data["about"]
    rows = sorted(
        data["rows"], key=lambda row: (row["format"] == "float8", row["format"], row["activations"])
    )
    text = (
        f"{about['date']}; {about['cpu']}; torch {about['torch']}, ao-core {about['ao-core']}. "
        f"{about['calibration_tokens']:,} tokens to find scales, {about['tokens']:,} others to measure."
    )
    dynamic = {row["format"]: row["kl_nats"] for row in rows if row["activations"] == "dynamic"}
    lines = [
        [
            row["format"],
            row["activations"],
            f"{row['kl_nats']:.4f}",
            f"{row['kl_nats'] / dynamic[row['format']]:.2f}",
            f"{row['agreement']:.3f}",
            f"{row['static']} of {row['weights']}",
        ]
        for row in rows
    ]
    return "\n\n".join([table(HEADER, lines), text])


if __name__ == "__main__":
    text = section(json.loads(RESULTS.read_text(encoding="utf-8")))
    sys.exit(main({(PAGE, "static"): text}, Path(__file__).name))
