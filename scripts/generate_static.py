"""Write what static scales cost SmolLM2 and MiniLM, examples/*/static.json, into docs/calibration.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "calibration.md"


class Loss(NamedTuple):
    """What a model loses, by its name in the file."""

    key: str
    title: str
    #: what the share of answers that stay is of
    same: str


#: section of the page -> (folder of the example, the loss)
SECTIONS = {
    "static": ("smollm2", Loss("kl_nats", "KL, nats", "same token")),
    "static minilm": ("minilm", Loss("noise", "noise", "same document")),
}


def section(data: dict[str, Any], loss: Loss) -> str:
    """The table, the weights without static scales, and what was measured, where."""
    about = data["about"]
    rows = sorted(
        data["rows"], key=lambda row: (row["format"] == "float8", row["format"], row["activations"])
    )
    text = (
        f"{about['date']}; {about['cpu']}; torch {about['torch']}, ao-core {about['ao-core']}. "
        f"{about['calibration_tokens']:,} tokens to find scales, {about['tokens']:,} others to measure."
    )
    dynamic = {row["format"]: row[loss.key] for row in rows if row["activations"] == "dynamic"}
    header = ["both operands in", "scales of activations", loss.title, "× dynamic", loss.same]
    lines = [
        [
            row["format"],
            row["activations"],
            f"{row[loss.key]:.4f}",
            f"{row[loss.key] / dynamic[row['format']]:.2f}",
            f"{row['agreement']:.3f}",
            f"{row['static']} of {row['weights']}",
        ]
        for row in rows
    ]
    left = [
        f"- {row['format']}: {kinds(row['left_dynamic'])}"
        for row in rows
        if row["activations"] == "static" and row.get("left_dynamic")
    ]
    listed = ['Left dynamic by "static", with how many of each:', "\n".join(left)] if left else []
    return "\n\n".join([table([*header, "static weights"], lines), *listed, text])


def kinds(names: list[str]) -> str:
    """Names of weights, those of all layers once."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight") for name in names)
    return ", ".join(f"`{name}` {count}" for name, count in counts.items())


if __name__ == "__main__":
    texts = {}
    for name, (folder, loss) in SECTIONS.items():
        found = json.loads((ROOT / "examples" / folder / "static.json").read_text(encoding="utf-8"))
        texts[PAGE, name] = section(found, loss)
    sys.exit(main(texts, Path(__file__).name))
