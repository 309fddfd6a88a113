"""Write what calibrated algorithms cost three models into docs/algorithms.md.

Reads examples/*/algorithms.json.

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
#: folder below examples -> what was measured
MODELS = {
    "smollm2": """\
on {tokens:,} tokens; calibrated on {calibration_tokens:,} tokens of other text. A seed is that of the \
weights (one function, on other grids) and of the calibration text""",
    "bytelm": """\
on {bytes:,} bytes of files that the model has not seen; calibrated on {calibration_bytes:,} bytes of \
files that it has. A seed is that of the calibration text""",
    "digits": """\
on {images:,} images; calibrated on {calibration_images:,} others. A seed is that of the model's training \
and of the calibration images""",
}
#: what others are compared with, in the same format
NEAREST = "rounding to nearest"


def measured(found: dict[str, Any], text: str) -> str:
    """What was measured, where."""
    return (
        f"KL to the original in nats, {text.format(**found)}. "
        f"Measured {found['date']}; {found['cpu']}, {found['cores']} cores; torch {found['torch']}."
    )


def costs(rows: list[dict[str, Any]]) -> str:
    """One line for each format and method."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["format"], {}).setdefault(row["method"], []).append(row)
    has_classes = any("top1" in row for row in rows)
    lines = []
    for name, methods in found.items():
        nearest = _kl(methods.get(NEAREST, []))
        for method, cells in methods.items():
            values = _kl(cells)
            bits = [row["bits_per_weight"] for row in cells if "bits_per_weight" in row]
            line = [
                name,
                method,
                f"{mean(bits):.2f}" if bits else "–",
                f"{mean(values):.3g}",
                f"{mean(values) / mean(nearest):.2f}" if nearest else "–",
                f"{min(values):.3g} … {max(values):.3g}" if len(values) > 1 else "–",
                str(len(values)),
            ]
            if has_classes:
                right, before = (
                    mean(row[key] for row in cells) for key in ("top1", "top1_of_original")
                )
                line.append(f"{right:.1%} of {before:.1%}")
            lines.append(line)
    header = ["format", "method", "bits", "KL", "of rounding's", "least … greatest", "seeds"]
    return table([*header, "right, of the original's"] if has_classes else header, lines)


def _kl(rows: list[dict[str, Any]]) -> list[float]:
    return [row["kl_nats"] for row in rows]


if __name__ == "__main__":
    sections = {}
    for name, text in MODELS.items():
        file = ROOT / "examples" / name / "algorithms.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        sections[PAGE, f"measured {name}"] = measured(data["about"], text)
        sections[PAGE, f"costs {name}"] = costs(data["rows"])
    sys.exit(main(sections, "generate_algorithms.py"))
