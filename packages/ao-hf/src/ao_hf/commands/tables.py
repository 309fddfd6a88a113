"""The tables of `ao bench`: a row for each contender, measured or computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ao_core.ext.reports import size_text

if TYPE_CHECKING:
    from ao_hf.commands.contenders import Missing
    from ao_hf.generation import Measured
    from ao_hf.generation.passes import MeasuredPass
    from ao_hf.generation.rounds import Spread

__all__ = ["PASSES", "TEXTS", "Table", "table_of"]

_NOT = "not measured"


@dataclass(frozen=True)
class Table:
    """What is shown of one kind of workloads.

    Attributes:
        header: names of the columns, with places for the unit and for the first contender.
        cells: those of a row that was measured.
        missing: those of one that does not fit.
    """

    header: Sequence[str]
    cells: Callable[[Any], Sequence[str]]
    missing: Callable[[Missing], Sequence[str]]


def table_of(table: Table, measured: Sequence[Any], missing: Sequence[Missing]) -> tuple[Any, Any]:
    """Header and rows, of one workload."""
    first = measured[0].contender if measured else missing[0].contender
    unit = getattr((measured or missing)[0].workload, "unit", "")
    header = [name.format(first=first, unit=unit) for name in table.header]
    rows = [tuple(table.cells(row)) for row in measured]
    return header, rows + [tuple(table.missing(row)) for row in missing]


def _spread(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def _computed(size: int | None) -> str:
    return "" if size is None else f"{size_text(size)}, computed"


def _peak(row: Measured | MeasuredPass) -> str:
    return size_text(row.peak_resident if row.peak_allocated is None else row.peak_allocated)


def _of_text(row: Measured) -> Sequence[str]:
    return (
        row.contender,
        f"{row.first_seconds.median:.3f} s",
        f"{row.prefill_rate.median:.0f}/s",
        _spread(row.decode_rate, 1),
        f"{row.times_baseline.median:.2f}",
        size_text(int(row.bytes_per_token)),
        f"{row.share_of_read.median:.0%}",
        size_text(row.weights_bytes),
        size_text(row.cache_bytes),
        _peak(row),
    )


def _of_pass(row: MeasuredPass) -> Sequence[str]:
    return (
        row.contender,
        _spread(row.seconds, 3),
        f"{row.rate.median:.3g}",
        f"{row.times_baseline.median:.2f}",
        size_text(row.weights_bytes),
        _peak(row),
    )


def _missing_text(row: Missing) -> Sequence[str]:
    sizes = (_computed(row.weights_bytes), _computed(row.cache_bytes))
    return (row.contender, _NOT, _NOT, _NOT, _NOT, _NOT, _NOT, *sizes, _NOT)


def _missing_pass(row: Missing) -> Sequence[str]:
    return (row.contender, _NOT, _NOT, _NOT, _computed(row.weights_bytes), _NOT)


TEXTS = Table(
    (
        "contender", "first token", "prefill", "decode, tokens/s", "× {first}", "per token", "of read rate",
        "weights read", "cache", "peak memory",
    ),
    _of_text,
    _missing_text,
)  # fmt: skip
PASSES = Table(
    ("contender", "a pass, s", "{unit}s/s", "× {first}", "weights", "peak memory"),
    _of_pass,
    _missing_pass,
)
