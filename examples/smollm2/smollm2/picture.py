"""One picture that needs three seconds: size against quality, and how fast each is, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from smollm2.contenders import Result

WIDTH, HEIGHT = 460, 300
LEFT, TOP, RIGHT, BOTTOM = 54, 44, 20, 46
STYLE = """
text { fill: #1b1f24; font: 13px system-ui, sans-serif; }
.title { font-size: 15px; font-weight: 700; }
.note { fill: #57606a; font-size: 12px; }
.line { fill: none; stroke: #4051b5; stroke-width: 2; stroke-opacity: .5; }
.axis { stroke: #8c959f; stroke-width: 1; }
.ours { fill: #4051b5; }
.theirs { fill: #8c959f; }
"""


def pareto(results: Sequence[Result]) -> list[Result]:
    """Those that no other beats in both size and quality, by size."""
    best: list[Result] = []
    for each in sorted(results, key=lambda r: (r.disk_bytes, -r.agreement)):
        if not best or each.agreement > best[-1].agreement:
            best.append(each)
    return best


def size_and_quality(results: Sequence[Result]) -> str:
    """Points labelled by name; the line joins those that nothing beats. Left and up is better."""
    most = max(r.disk_bytes for r in results)
    floor = min(0.9, min(r.agreement for r in results) - 0.05)

    def place(result: Result) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT - 40) * result.disk_bytes / most
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - result.agreement) / (1 - floor)
        return x, y

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, pareto(results)))
    foot = HEIGHT - BOTTOM
    below = f"size on disk, 0 to {most / 1e6:.0f} MB; left and up is better"
    parts = [
        f'<line class="axis" x1="{LEFT}" y1="{foot}" x2="{WIDTH - RIGHT}" y2="{foot}"/>',
        f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{foot}"/>',
        f'<text class="note" x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">100%</text>',
        f'<text class="note" x="{LEFT - 6}" y="{foot}" text-anchor="end">{floor:.0%}</text>',
        f'<text class="note" x="{LEFT}" y="{HEIGHT - 22}">{below}</text>',
        f'<polyline class="line" points="{line}"/>',
    ]
    for result in results:
        x, y = place(result)
        kind = "theirs" if result.recipe is None else "ours"
        label = f"{escape(result.name)}, {result.disk_bytes / 1e6:.0f} MB"
        # beside the point, where there is room
        at, under, anchor = (x + 6, y + 28, "end") if x > 0.6 * WIDTH else (x + 10, y + 16, "start")
        parts += [
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"/>',
            f'<text x="{at:.1f}" y="{under:.1f}" text-anchor="{anchor}">{label}</text>',
        ]
    return _svg("Size and quality", "same next word as the original", parts, results)


def speed(results: Sequence[Result]) -> str:
    """Bars of tokens per second."""
    timed = [result for result in results if result.decode_rate is not None]
    most = max(result.decode_rate or 0.0 for result in timed)
    parts = []
    for row, result in enumerate(timed):
        y, rate = TOP + 24 + 64 * row, result.decode_rate or 0.0
        kind, wide = "theirs" if result.recipe is None else "ours", WIDTH * rate / most
        ratio = "" if result.recipe is None else f" ({result.times_original:.1f} ×)"
        parts += [
            f'<text x="0" y="{y}">{escape(result.name)}</text>',
            f'<text x="{WIDTH}" y="{y}" text-anchor="end">{rate:.1f} tokens/s{ratio}</text>',
            f'<rect class="{kind}" x="0" y="{y + 8}" width="{wide:.1f}" height="18" rx="3"/>',
        ]
    return _svg("Speed", "tokens per second of generated text", parts, timed)


def _svg(title: str, note: str, parts: Sequence[str], results: Sequence[Result]) -> str:
    told = escape("; ".join(_told(result) for result in results), quote=True)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {told}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    heads = [
        f'<text class="title" x="0" y="14">{title}</text>',
        f'<text class="note" x="0" y="31">{note}</text>',
    ]
    return "\n".join([begin, f"<style>{STYLE}</style>", *heads, *parts, "</svg>"])


def _told(result: Result) -> str:
    rate = "" if result.decode_rate is None else f", {result.decode_rate:.1f} tokens/s"
    return f"{result.name} {result.disk_bytes / 1e6:.3g} MB, {result.agreement:.0%}{rate}"
