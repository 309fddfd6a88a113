"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from minilm_demo import plots, table
from minilm_demo.results import Result


def render(results: Sequence[Result], left_out: dict[str, str], about: dict[str, Any]) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["db"] = table.decibel
    tables = {
        "Size and quality": (table.SIZE_AND_QUALITY, [table.size_cells(r) for r in results]),
        **{
            f"Latency of {workload}": (
                table.TIMES,
                [table.time_cells(r, workload) for r in results],
            )
            for workload in results[0].latency
        },
    }
    figures = {
        "Quality by size": plots.quality_by_size(results),
        "Memory by part of the model": plots.bytes_by_part(results),
        "Weight SQNR by layer": plots.sqnr_by_layer(results),
        "Speed": plots.speed(results),
    }
    return environment.get_template("page.html.j2").render(
        results=results,
        tables=tables,
        figures=figures,
        about=about,
        notes=table.notes(results, about),
        left_out=left_out,
    )
