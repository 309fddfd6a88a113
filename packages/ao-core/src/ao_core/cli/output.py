"""How commands write: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ao_core.report.text import aligned

__all__ = ["JSON", "WIDTH", "folded", "show_json", "show_table"]

#: characters of a line, where there is no terminal
WIDTH = 120
#: the option that all listing commands have
JSON: bool = typer.Option(False, "--json", help="Print JSON instead of tables.")


def folded(line: str) -> str:
    """A line, folded between words where it is longer than `WIDTH`."""
    return fill(
        line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def show_json(data: Any) -> None:
    """Write data as JSON."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def show_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> None:
    """A table: fitted to the terminal, or, into a file or pipe, to lines of 120 characters."""
    rows, right = list(rows), set(right)
    console = Console()
    if not console.is_terminal:
        typer.echo(f"{title}\n{aligned([header, *rows], right=right, width=WIDTH)}\n")
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        # brackets in formats and file names are no markup
        table.add_row(*map(Text, row))
    console.print(table)
