"""Write what quantization-aware training recovers, examples/*/qat.json, into docs/qat.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from statistics import mean
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "qat.md"
#: folder below examples -> what was measured
MODELS = {
    "bytelm": "The byte model, on {bytes:,} bytes of files that it has not seen; the original has "
    "{bits_per_byte_before:.4f} bits per byte",
    "smollm2": "SmolLM2-135M, on {tokens:,} tokens",
}
NEAREST, CALIBRATED, TRAINED = "rounding to nearest", "GPTQ", "QAT"


def section(found: dict[str, Any], text: str) -> str:
    """What was measured, and a line for each format and method."""
    about = found["about"]
    machine = f"{about['cpu']}, one thread; torch {about['torch']}"
    head = f"{text.format(**about)}. Measured {about['date']}; {machine}."
    return f"{head}\n\n{costs(found['rows'], about.get('bits_per_byte_before'))}"


def costs(rows: list[dict[str, Any]], before: float | None) -> str:
    """The mean over the seeds that a cell has, and what training takes away of the KL of others."""
    lines = []
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = {
            method: [r for r in rows if (r["format"], r["method"]) == (name, method)]
            for method in (NEAREST, CALIBRATED, TRAINED)
        }
        kls = {method: mean(r["kl_nats"] for r in own) for method, own in cells.items() if own}
        for method, own in cells.items():
            if not own:
                continue
            bits = mean(float(r.get("bits_per_byte") or r["bits_per_token"]) for r in own)
            above = "–" if before is None else f"{100 * (bits / before - 1):+.2f} %"
            taken = [
                f"{100 * (1 - kls[TRAINED] / kls[other]):.0f} % of {text}"
                for other, text in ((NEAREST, "rounding's"), (CALIBRATED, "GPTQ's"))
                if method == TRAINED and other in kls
            ]
            lines.append(
                [
                    name,
                    method,
                    steps(own[0]),
                    f"{kls[method]:.4f}",
                    f"{bits:.4f}",
                    above,
                    ", ".join(taken) or "–",
                    str(len(own)),
                ]
            )
    header = [
        "format",
        "method",
        "steps",
        "KL, nats",
        "bits",
        "to the original",
        "KL recovered",
        "seeds",
    ]
    return table(header, lines)


def steps(row: dict[str, Any]) -> str:
    """Steps of a training, and the sequences and tokens in each."""
    if "losses" not in row:
        return "–"
    return f"{len(row['losses'])} of {row['batch']} × {row['context']}"


def sections() -> dict[str, str]:
    """The one section, of the models that there are results of."""
    parts = []
    for name, text in MODELS.items():
        file = ROOT / "examples" / name / "qat.json"
        if file.exists():
            parts.append(section(json.loads(file.read_text(encoding="utf-8")), text))
            if (ROOT / "docs" / "assets" / f"qat-{name}.png").exists():
                parts.append(f"![The loss of each step of training](assets/qat-{name}.png)")
    return {"measured": "\n\n".join(parts)}


if __name__ == "__main__":
    pages = {(PAGE, name): text for name, text in sections().items()}
    sys.exit(main(pages, "generate_qat.py"))
