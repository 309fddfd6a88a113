"""A report as a matplotlib figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.errors import MissingExtraError
from ao_core.report.text import summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ao_core.report.records import Report

__all__ = ["report_figure"]

#: above this many parameters their names would overlap
_MOST_NAMES = 60


def report_figure(report: Report) -> Figure:
    """Weight SQNR above, bytes before and after below; one position on the x axis a parameter."""
    try:
        # not pyplot: it would choose a backend and keep the figure alive
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "ao-core[report]", "Report.plot()") from error
    records = report.with_status("changed")
    positions = range(len(records))
    figure = Figure(figsize=(max(6.4, min(0.2 * len(records), 24)), 7), layout="constrained")
    quality, size = figure.subplots(2, 1, sharex=True)
    # bars of inf or nan cannot be drawn
    heights = [(x, r.sqnr_db) for x, r in enumerate(records) if r.sqnr_db is not None]
    finite = [(x, y) for x, y in heights if abs(y) < float("inf")]
    quality.bar([x for x, _ in finite], [y for _, y in finite])
    quality.set(ylabel="weight SQNR in dB", title=summary(report))
    size.bar(positions, [r.bytes_before / 1e6 for r in records], color="lightgray", label="before")
    size.bar(positions, [r.bytes_after / 1e6 for r in records], width=0.5, label="after")
    size.set(ylabel="MB", xlabel="quantized parameter")
    if records:
        size.legend()
    if len(records) <= _MOST_NAMES:
        size.set_xticks(positions, [r.fqn for r in records], rotation=90, fontsize=7)
    return figure
