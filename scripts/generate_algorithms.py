"""Write what calibrated algorithms cost SmolLM2 into docs/algorithms.md.

Reads examples/smollm2/algorithms.json.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from statistics import mean
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "algorithms.md"
RESULTS = ROOT / "examples" / "smollm2" / "algorithms.json"
#: what others are compared with, in the same format
NEAREST = "rounding to nearest"


def measured(found: dict[str, Any]) -> str:
    """What was measured, where."""
    return (
        f"KL to the original in nats per token, on {found['tokens']:,} tokens; calibrated on "
        f"{found['calibration_tokens']:,} tokens of other text. Means over the seeds of weights and texts. "
        f"Measured {found['date']}; {found['cpu']}, {found['cores']} cores; torch {found['torch']}."
    )


def costs(rows: list[dict[str, Any]]) -> str:
    """One line for each format and method."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row["format"], {}).setdefault(row["method"], []).append(row["kl_nats"])
    lines = []
    for name, methods in found.items():
        nearest = methods.get(NEAREST)
        for method, values in methods.items():
            share = f"{mean(values) / mean(nearest):.2f}" if nearest else "–"
            spread = f"{min(values):.3f} … {max(values):.3f}" if len(values) > 1 else "–"
            lines.append([name, method, f"{mean(values):.3f}", share, spread, str(len(values))])
    header = ["format", "method", "KL", "of rounding's", "least … greatest", "seeds"]
    return table(header, lines)


if __name__ == "__main__":
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    sections = {
        (PAGE, "measured"): measured(data["about"]),
        (PAGE, "costs"): costs(data["rows"]),
    }
    sys.exit(main(sections, "generate_algorithms.py"))
