"""The report as one HTML page that needs nothing else, and the same as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from smollm2 import picture
from smollm2.contenders import PROMPT, Result

HEADER = ["", "disk", "memory", "KL, nats", "same next word", "decode", "prefill"]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
.pictures { display: flex; flex-wrap: wrap; gap: 2rem; }
.pictures svg { flex: 1 1 24rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
blockquote { margin: .3rem 0 1rem; padding-left: 1rem; border-left: 3px solid #4051b5;
  white-space: pre-wrap; }
"""


def cells(result: Result) -> list[str]:
    """One line of the table."""
    rate = "–"
    if result.decode_rate is not None:
        rate = f"{result.decode_rate:.1f}/s"
        if result.recipe is not None:
            rate += f", {result.times_original:.1f} ×"
    return [
        result.name,
        f"{result.disk_bytes / 1e6:.1f} MB",
        f"{result.memory_bytes / 1e6:.1f} MB",
        f"{result.kl_nats:.4f}",
        f"{result.agreement:.1%}",
        rate,
        "–" if result.prefill_rate is None else f"{result.prefill_rate:.0f}/s",
    ]


def notes(about: dict[str, Any]) -> str:
    """What was measured, where."""
    versions = about["versions"]
    return (
        f"{about['model']} on {about['machine']}, {about['threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {about['date'][:10]}. Quality: {about['tokens']} tokens "
        "of Python's documentation, beside the original. Speed: medians of rounds in which the models take "
        "turns, after a prompt of 64 tokens."
    )


def render(results: Sequence[Result], about: dict[str, Any]) -> str:
    """The page as text."""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(result)) + "</tr>\n"
        for result in results
    )
    head = "".join(f"<th scope='col'>{name}</th>" for name in HEADER)
    texts = "".join(
        f"<h3>{escape(result.name)}</h3><blockquote>{escape(result.text)}</blockquote>\n"
        for result in results
        if result.text
    )
    recipes = "".join(
        f"<li>{escape(result.name)}: <code>{escape(result.recipe)}</code></li>"
        for result in results
        if result.recipe is not None
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A language model in fewer bits</title>
<style>{STYLE}</style>
</head>
<body>
<h1>A language model in fewer bits</h1>
<div class="pictures">
{picture.size_and_quality(results)}
{picture.speed(results)}
</div>
<h2>Figures</h2>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table>
<p>{escape(notes(about))}</p>
<h2>“{escape(PROMPT)}”</h2>
{texts}<h2>Recipes</h2>
<ul>{recipes}</ul>
</body>
</html>
"""
