"""Write what calibrated algorithms cost three models into docs/algorithms.md.

Reads examples/*/algorithms.json.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from statistics import mean, median
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
LLAMA = "llama.cpp with its imatrix"
#: format and method, what it is compared with, and the most that its KL may be of that one's
BARS = (
    ("int4 g128", "GPTQ", "int4 g128", NEAREST, 0.65),
    ("int3 g64", "GPTQ", "int3 g64", NEAREST, 0.5),
    ("int3 g64", "AutoRound", "int3 g64", "GPTQ", 1.0),
    ("int2 g64", "AutoRound", "int2 g64", "GPTQ", 0.5),
    ("trellis 2", "GPTQ", "int2 g64", "AutoRound", 1.0),
    ("trellis 2", "GPTQ", "int2 g64", "GPTQ", 1.0),
    ("q4_k", "importance", "q4_k", LLAMA, 1.0),
    ("q3_k", "importance", "q3_k", LLAMA, 1.0),
    ("W8A8", "SmoothQuant", "int8", NEAREST, 1.5),
    ("W8A8", "SmoothQuant, GPTQ", "int8", NEAREST, 1.5),
    ("W4A4 int4", "rotation, GPTQ", "W4A4 int4", "GPTQ", 0.35),
    ("W4A4 mxfp4", "block rotation, GPTQ", "W4A4 mxfp4", NEAREST, 0.6),
)


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


def judged(rows: list[dict[str, Any]]) -> str:
    """One line for each of `BARS` that both sides were measured of, by the ratios of the same seed."""
    found = {(row["format"], row["method"], row["seed"]): row["kl_nats"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    lines = []
    for name, method, other, than, most in BARS:
        ratios = [
            found[name, method, seed] / found[other, than, seed]
            for seed in seeds
            if (name, method, seed) in found and (other, than, seed) in found
        ]
        if not ratios:
            continue
        middle = median(ratios)
        lines.append(
            [
                f"{name}, {method}",
                than if other == name else f"{other}, {than}",
                f"{middle:.2f}",
                f"{min(ratios):.2f} … {max(ratios):.2f}" if len(ratios) > 1 else "–",
                str(len(ratios)),
                f"{most:g}",
                "met" if middle <= most else "missed",
            ]
        )
    header = [
        "KL of",
        "of that of",
        "median",
        "least … greatest",
        "seeds",
        "aim, at most",
        "verdict",
    ]
    return table(header, lines)


def _kl(rows: list[dict[str, Any]]) -> list[float]:
    return [row["kl_nats"] for row in rows]


if __name__ == "__main__":
    sections = {}
    for name, text in MODELS.items():
        file = ROOT / "examples" / name / "algorithms.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        sections[PAGE, f"measured {name}"] = measured(data["about"], text)
        sections[PAGE, f"judged {name}"] = judged(data["rows"])
        sections[PAGE, f"costs {name}"] = costs(data["rows"])
    sys.exit(main(sections, "generate_algorithms.py"))
