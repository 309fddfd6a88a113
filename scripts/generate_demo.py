"""Write what the demo measured, examples/smollm2/demo.json, into README.md.

`nox -s demo -- --json examples/smollm2/demo.json` measures anew. With --check nothing is written, and the
exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_sections import main, table
from workspace import ROOT

RESULTS = ROOT / "examples" / "smollm2" / "demo.json"
HEADER = ["", "disk", "KL, nats", "same next word", "tokens per second"]


def section(data: dict[str, Any]) -> str:
    """The table of those whose speed was measured, and where that was."""
    about = data["about"]
    rows = [row for row in data["results"] if row["decode_rate"] is not None]
    text = (
        f"{about['model']}, {about['threads']} thread(s) of an {about['machine']}, {about['date'][:10]}. "
        f"KL and next words: compared with the original, over {about['tokens']} tokens of Python's "
        "documentation."
    )
    return "\n\n".join([table(HEADER, list(map(line, rows))), text])


def line(row: dict[str, Any]) -> list[str]:
    """One model."""
    ratio = "" if row["recipe"] is None else f" ({row['times_original']:.1f} ×)"
    return [
        row["name"] if row["recipe"] is None else f"{row['name']}, `{row['recipe']}`",
        f"{row['disk_bytes'] / 1e6:.0f} MB",
        f"{row['kl_nats']:.3f}",
        f"{row['agreement']:.0%}",
        f"{row['decode_rate']:.0f}{ratio}",
    ]


if __name__ == "__main__":
    text = section(json.loads(RESULTS.read_text(encoding="utf-8")))
    sys.exit(main({(ROOT / "README.md", "demo"): text}, Path(__file__).name))
