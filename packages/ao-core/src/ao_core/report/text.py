"""A report as text for terminals and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ao_core.report.records import ParameterRecord, Report

__all__ = [
    "aligned",
    "decibels",
    "left_alone",
    "names",
    "percent",
    "report_text",
    "shape_text",
    "size_text",
    "summary",
]

_HEADER = ("parameter", "shape", "format", "kernel", "before", "after", "SQNR", "sparsity")
_RIGHT = (4, 5, 6, 7)


def report_text(report: Report) -> str:
    """The quantized parameters as a table, the others grouped by reason, and the totals."""
    quantized = report.with_status("quantized")
    blocks = []
    if quantized:
        rows = [_HEADER, *map(_row, quantized)]
        if all(record.sparsity is None for record in quantized):
            rows = [row[:-1] for row in rows]
        blocks.append(aligned(rows, right=_RIGHT))
    return "\n\n".join([*blocks, *left_alone(report), summary(report)])


def left_alone(report: Any) -> Iterator[str]:
    """Of any report with records by status: which were skipped, and why, and why how many were kept."""
    if skipped := report.with_status("skipped"):
        lines = [f"  {names(record)}: {record.reason}" for record in skipped]
        yield "\n".join([f"skipped ({len(skipped)}), though asked for:", *lines])
    if kept := report.with_status("kept"):
        counts = Counter(record.reason for record in kept)
        lines = [f"  {count} × {reason}" for reason, count in counts.most_common()]
        yield "\n".join([f"kept ({len(kept)}):", *lines])


def summary(report: Report) -> str:
    """The totals in one line."""
    count, total = len(report.with_status("quantized")), len(report.records)
    share = 100.0 * report.bytes_after / max(report.bytes_before, 1)
    return (
        f"{count} of {total} parameters quantized, {report.coverage:.1f}% of the bytes: "
        f"{size_text(report.bytes_before)} → {size_text(report.bytes_after)} ({share:.1f}%) "
        f"in {report.seconds:.2f} s"
    )


def names(record: Any) -> str:
    """The name of a parameter, with the names of those tied to it."""
    return " = ".join((record.fqn, *record.tied))


def aligned(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Rows as lines whose columns line up, the first underlined; `right`: columns flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = set(right)

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), line(["-" * w for w in widths]), *map(line, rows[1:])])


def size_text(size: int) -> str:
    """Bytes in the largest decimal unit that keeps a digit before the point: "25.3 MB"."""
    if size < 1000:
        return f"{size} B"
    value, unit = size / 1000, 0
    while value >= 999.95 and unit < 3:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {('kB', 'MB', 'GB', 'TB')[unit]}"


def decibels(value: float | None) -> str:
    """An SQNR as text; empty where there is none."""
    return "" if value is None else f"{value:.1f} dB"


def percent(share: float | None) -> str:
    """A share as text; empty where there is none."""
    return "" if share is None else f"{share:.1%}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text: "512×256"."""
    return "×".join(map(str, shape))


def _row(record: ParameterRecord) -> tuple[str, ...]:
    return (
        names(record),
        shape_text(record.shape),
        record.spec,
        record.kernel,
        size_text(record.bytes_before),
        size_text(record.bytes_after),
        decibels(record.sqnr_db),
        percent(record.sparsity),
    )
