"""A report as text for terminals and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ao_core.report.records import ParameterRecord, Report

__all__ = [
    "aligned",
    "calibrated_texts",
    "decibels",
    "left_alone",
    "names",
    "percent",
    "report_text",
    "shape_text",
    "size_text",
    "summary",
]

_HEADER = (
    *("parameter", "shape", "format", "kernel", "before", "after", "SQNR", "sparsity"),
    *("rows", "damping", "error/RTN"),
)
_RIGHT = tuple(range(4, len(_HEADER)))
#: characters of a column that is folded, at least
_NARROWEST = 20


def report_text(report: Report) -> str:
    """The quantized parameters as a table, why some have another format, the others by reason, totals."""
    quantized = report.with_status("changed")
    blocks = []
    if quantized:
        rows = [_HEADER, *map(_row, quantized)]
        shown = [column for column in range(len(_HEADER)) if _says(column, rows[1:])]
        right = [place for place, column in enumerate(shown) if column in _RIGHT]
        blocks.append(aligned([[row[column] for column in shown] for row in rows], right=right))
    if other := [f"  {names(r)}: {r.reason}" for r in quantized if r.reason]:
        blocks.append("\n".join([f"in another format ({len(other)}):", *other]))
    if notes := [f"  {names(r)}: {r.note}" for r in report.records if r.note]:
        blocks.append("\n".join([f"notes ({len(notes)}):", *notes]))
    calibration = [f"calibrated by {report.calibration}"] if report.calibration else []
    return "\n\n".join([*blocks, *left_alone(report), *calibration, summary(report)])


def _says(column: int, rows: Sequence[Sequence[str]]) -> bool:
    """Whether a column has anything to say: in training kernels and SQNR are empty, and bytes stay."""
    if _HEADER[column] in ("kernel", *_HEADER[_HEADER.index("SQNR") :]):
        return any(row[column] for row in rows)
    before, after = _HEADER.index("before"), _HEADER.index("after")
    return column != after or any(row[before] != row[after] for row in rows)


def left_alone(report: Any) -> Iterator[str]:
    """Of any report with records by status: which were skipped, and why, and why how many were kept."""
    if skipped := report.with_status("skipped"):
        lines = [f"  {names(record)}: {record.reason}" for record in skipped]
        yield "\n".join([f"skipped ({len(skipped)}), though asked for:", *lines])
    if kept := report.with_status("unchanged"):
        counts = Counter(record.reason for record in kept)
        lines = [f"  {count} × {reason}" for reason, count in counts.most_common()]
        yield "\n".join([f"unchanged ({len(kept)}):", *lines])


def summary(report: Report) -> str:
    """The totals in one line."""
    count, total = len(report.with_status("changed")), len(report.records)
    if count and report.bytes_after == report.bytes_before:
        return (
            f"{count} of {total} parameters, {report.coverage:.1f}% of the bytes, are multiplied in low "
            f"precision; they stay as they are, {size_text(report.bytes_before)} in all"
        )
    share = 100.0 * report.bytes_after / max(report.bytes_before, 1)
    return (
        f"{count} of {total} parameters changed, {report.coverage:.1f}% of the bytes: "
        f"{size_text(report.bytes_before)} → {size_text(report.bytes_after)} ({share:.1f}%) "
        f"in {report.seconds:.2f} s"
    )


def names(record: Any) -> str:
    """The name of a parameter, with the names of those tied to it."""
    return " = ".join((record.fqn, *record.tied))


def aligned(
    rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), width: int | None = None
) -> str:
    """Rows as lines whose columns line up, the first underlined; `right`: columns flush right.

    Where the lines would be longer than `width`, the widest columns but the first are folded between words.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(range(1, len(widths)), key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    right = set(right)

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    def lines(row: Sequence[str]) -> Iterator[str]:
        cells = [
            wrap(cell, w) if len(cell) > w else [cell] for cell, w in zip(row, widths, strict=True)
        ]
        yield from map(line, zip_longest(*cells, fillvalue=""))

    head, *rest = rows
    below = [text for row in rest for text in lines(row)]
    return "\n".join([*lines(head), line(["-" * w for w in widths]), *below])


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
        *calibrated_texts(record),
    )


def calibrated_texts(record: ParameterRecord) -> tuple[str, str, str]:
    """Rows seen, damping used and error against rounding to nearest, empty where there is nothing to say."""
    return (
        "" if record.rows is None else f"{record.rows:,}",
        "" if record.damping is None else f"{record.damping:g}",
        "" if record.error_vs_rtn is None else f"{record.error_vs_rtn:.3f}",
    )
