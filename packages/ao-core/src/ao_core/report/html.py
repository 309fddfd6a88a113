"""A report as one HTML page: the charts as SVG here, all else in `page.html.j2`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import TYPE_CHECKING

from ao_core.errors import MissingExtraError
from ao_core.report.text import (
    calibrated_texts,
    decibels,
    names,
    percent,
    shape_text,
    size_text,
    summary,
)

if TYPE_CHECKING:
    from ao_core.report.records import ParameterRecord, Report

__all__ = ["report_html"]

#: fields of records -> heads of their columns, shown where a record has them
_CALIBRATED = {"rows": "Rows", "damping": "Damping", "error_vs_rtn": "Error/RTN"}
#: all in units of the SVG, which are pixels
_HEIGHT, _LEFT, _WIDTH = 200.0, 64.0, 1200.0
#: from one bar to the next; more than fit the width at the least are scrolled
_LEAST_PITCH, _MOST_PITCH = 14.0, 28.0


@dataclass(frozen=True)
class Bar:
    """A rectangle, with the text that appears when one points at it, and a class for its colour."""

    x: float
    y: float
    width: float
    height: float
    text: str
    kind: str


@dataclass(frozen=True)
class Chart:
    """A bar chart ready to be drawn, and the sentence that says the same to who cannot see it."""

    title: str
    description: str
    width: float
    height: float
    left: float
    bars: tuple[Bar, ...]
    #: (height, label) of the lines across
    ticks: tuple[tuple[float, str], ...]


def report_html(report: Report, title: str) -> str:
    """The page; see `Report.to_html`."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("jinja2", "ao-core[report]", "Report.to_html()") from error
    environment = Environment(
        loader=PackageLoader("ao_core.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=size_text, db=decibels, percent=percent, shape=shape_text, names=names
    )
    shown = [name for name in _CALIBRATED if name not in report.silent]

    def calibrated(record: ParameterRecord) -> list[tuple[str, object]]:
        texts = dict(zip(_CALIBRATED, calibrated_texts(record), strict=True))
        values = {name: getattr(record, name) for name in shown}
        return [(texts[name], "" if value is None else value) for name, value in values.items()]

    environment.filters["calibrated"] = calibrated
    return environment.get_template("page.html.j2").render(
        report=report,
        title=title,
        summary=summary(report),
        calibrated=tuple(_CALIBRATED[name] for name in shown),
        config=json.dumps(report.config, indent=2, ensure_ascii=False),
        charts=[chart for chart in (_quality(report), _sizes(report)) if chart is not None],
    )


def _quality(report: Report) -> Chart | None:
    """Weight SQNR of each quantized parameter; None where none is a finite number."""
    values = [
        (names(r), r.sqnr_db)
        for r in report.with_status("changed")
        if r.sqnr_db is not None and isfinite(r.sqnr_db)
    ]
    if not values:
        return None
    top, ticks = _axis(max(value for _, value in values), lambda value: f"{value:g} dB")
    bars = tuple(
        _bar(i, len(values), max(value, 0.0) / top, 0.8, f"{name}: {decibels(value)}", "after")
        for i, (name, value) in enumerate(values)
    )
    worst = min(values, key=lambda pair: pair[1])
    best = max(values, key=lambda pair: pair[1])
    description = (
        f"Weight SQNR of {len(values)} parameters, from {decibels(worst[1])} ({worst[0]}) "
        f"to {decibels(best[1])} ({best[0]})"
    )
    return _chart("Weight SQNR", description, len(values), bars, ticks)


def _sizes(report: Report) -> Chart | None:
    """Bytes of each quantized parameter before and after; None where there are none."""
    records = report.with_status("changed")
    largest = max((max(r.bytes_before, r.bytes_after) for r in records), default=0)
    if largest == 0:
        return None
    top, ticks = _axis(largest, lambda value: size_text(round(value)))
    bars = []
    for i, record in enumerate(records):
        for width, size, kind in (
            (0.8, record.bytes_before, "before"),
            (0.5, record.bytes_after, "after"),
        ):
            bars.append(
                _bar(
                    i,
                    len(records),
                    size / top,
                    width,
                    f"{names(record)}: {size_text(size)} {kind}",
                    kind,
                )
            )
    before = sum(r.bytes_before for r in records)
    after = sum(r.bytes_after for r in records)
    description = (
        f"Bytes of {len(records)} quantized parameters: {size_text(before)} before (wide bars), "
        f"{size_text(after)} after (narrow bars)"
    )
    return _chart("Bytes before and after", description, len(records), tuple(bars), ticks)


def _chart(
    title: str,
    description: str,
    count: int,
    bars: tuple[Bar, ...],
    ticks: tuple[tuple[float, str], ...],
) -> Chart:
    width = _LEFT + count * _pitch(count)
    return Chart(title, description, width, _HEIGHT, _LEFT, bars, ticks)


def _pitch(count: int) -> float:
    return round(min(max((_WIDTH - _LEFT) / count, _LEAST_PITCH), _MOST_PITCH), 2)


def _bar(index: int, count: int, share: float, width: float, text: str, kind: str) -> Bar:
    height, pitch = round(share * _HEIGHT, 2), _pitch(count)
    x = _LEFT + (index + (1 - width) / 2) * pitch
    y = round(_HEIGHT - height, 2)
    return Bar(round(x, 2), y, round(width * pitch, 2), height, text, kind)


def _axis(
    largest: float, label: Callable[[float], str]
) -> tuple[float, tuple[tuple[float, str], ...]]:
    """The value at the top of a chart, at a step of 1, 2 or 5 × 10ⁿ, and its ticks."""
    if largest <= 0:
        return 1.0, ((_HEIGHT, label(0)),)
    unit = 10.0 ** floor(log10(largest / 4))
    step = next(s * unit for s in (1, 2, 5, 10) if s * unit >= largest / 4)
    count = ceil(largest / step)
    ticks = tuple((round(_HEIGHT * (1 - i / count), 2), label(i * step)) for i in range(count + 1))
    return count * step, ticks
