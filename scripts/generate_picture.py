"""Draw what recipes do to size and speed, docs/assets/size-speed.svg, from recorded results.

Sizes and KL are those of examples/smollm2/quality.json, speeds those of the bars of the CPU kernels
(packages/ao-kernels/benchmarks/results/bars.json). With --check nothing is written, and the exit
status says whether the picture is fresh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from workspace import ROOT, finish

PICTURE = ROOT / "docs" / "assets" / "size-speed.svg"
QUALITY = ROOT / "examples" / "smollm2" / "quality.json"
BARS = ROOT / "packages" / "ao-kernels" / "benchmarks" / "results" / "bars.json"

#: recipes of the upper panel, below the dense model
SIZES = (
    "int8_weight_only",
    "mx_weight_only/mxfp6",
    "int4_weight_only/g32-asymmetric",
    "fp4_weight_only",
)
#: case of bars.json -> what the lower panel calls it; every one is a ratio to bfloat16
SPEEDS = {
    "M = 1: ao int4 g128, bf16 × F.linear bf16": "int4 weights, 1 row",
    "decoding: ao int8 × torch bf16": "int8 weights, decoding",
    "M = 64: ao int4 g128 dynamic, bf16 × F.linear bf16": "int4 weights, int8 activations, 64 rows",
    "M = 256: ao int4 g128 dynamic, bf16 × F.linear bf16": "int4 weights, int8 activations, 256 rows",
    "M = 256: ao int4 g128, bf16 × F.linear bf16": "int4 weights, 256 rows",
}

WIDTH, HEAD = 340, 44
ROW, BAR = 32, 9
#: legible by itself, on white and on black; a page that holds the picture inline may restyle it
STYLE = """
.ao-picture text { fill: #1b1f24; font: 12px system-ui, sans-serif; }
.ao-picture .title { font-size: 14px; font-weight: 700; }
.ao-picture .note { fill: #57606a; }
.ao-picture .ours { fill: #4051b5; }
.ao-picture .theirs { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
  .ao-picture text { fill: #e6edf3; }
  .ao-picture .note { fill: #9aa4ae; }
  .ao-picture .ours { fill: #8c9eff; }
}
"""


class Bar(NamedTuple):
    """One bar of a panel."""

    name: str
    value: float
    label: str
    #: what ao is compared with
    baseline: bool = False


def sizes(data: dict[str, Any]) -> list[Bar]:
    """The size of SmolLM2, dense and under each recipe, and what the recipe costs it."""
    rows = {row["name"]: row for row in data["rows"]}
    dense = rows["float32"]["bytes"] / 1e6
    original = {"float32": dense, "bfloat16": dense / 2}
    found = [Bar(name, size, f"{size:.0f} MB", baseline=True) for name, size in original.items()]
    for name in SIZES:
        size = rows[name]["bytes"] / 1e6
        found.append(Bar(name, size, f"{size:.0f} MB, KL {rows[name]['kl_nats']:.3f}"))
    return found


def speeds(data: dict[str, Any]) -> list[Bar]:
    """How many times as fast as bfloat16 each case is."""
    rows = {row["case"]: row["measured"] for row in data["rows"]}
    found = [Bar("bfloat16", 1.0, "1", baseline=True)]
    found += [Bar(name, rows[case], f"{rows[case]:.1f} ×") for case, name in SPEEDS.items()]
    return found


def panel(title: str, note: str, bars: Sequence[Bar], top: int) -> list[str]:
    """The elements of a panel whose first line begins at `top`."""
    lines = [
        f'<text class="title" x="0" y="{top + 14}">{escape(title)}</text>',
        f'<text class="note" x="0" y="{top + 32}">{escape(note)}</text>',
    ]
    longest = max(bar.value for bar in bars)
    for i, bar in enumerate(bars):
        y = top + HEAD + ROW * i
        kind = "theirs" if bar.baseline else "ours"
        size = f'width="{WIDTH * bar.value / longest:.1f}" height="{BAR}"'
        end = f'x="{WIDTH}" y="{y + 11}" text-anchor="end"'
        lines += [
            f'<text x="0" y="{y + 11}">{escape(bar.name)}</text>',
            f'<text class="note" {end}>{escape(bar.label)}</text>',
            f'<rect class="{kind}" x="0" y="{y + 16}" {size} rx="2"/>',
        ]
    return lines


def picture(quality: dict[str, Any], bars: dict[str, Any]) -> str:
    """The whole picture."""
    small, fast = sizes(quality), speeds(bars)
    cores = bars["about"]["cores"]
    below = HEAD + ROW * len(small) + 12
    height = below + HEAD + ROW * len(fast)
    described = "; ".join(f"{bar.name}: {bar.label}" for bar in [*small, *fast])
    body = [
        *panel("Size", "SmolLM2-135M; KL in nats per token, 0 is lossless", small, 0),
        *panel("Speed", f"times bfloat16, on {cores} CPU cores", fast, below),
    ]
    about = f'role="img" aria-label="{escape(described)}"'
    box = f'viewBox="0 0 {WIDTH} {height}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" class="ao-picture" {box} {about}>'
    return "\n".join([begin, f"<style>{STYLE}</style>", *body, "</svg>", ""])


def main() -> int:
    """Write the picture; with --check, only say whether it is fresh."""
    fresh = picture(
        json.loads(QUALITY.read_text(encoding="utf-8")),
        json.loads(BARS.read_text(encoding="utf-8")),
    )
    problems = []
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != fresh:
        if "--check" in sys.argv[1:]:
            problems.append(
                f"{PICTURE.relative_to(ROOT)}: not fresh; run scripts/{Path(__file__).name}"
            )
        else:
            PICTURE.write_text(fresh, encoding="utf-8")
    return finish(problems, PICTURE.name)


if __name__ == "__main__":
    sys.exit(main())
