"""The records of a report, its totals and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

from ao_core.errors import ConfigError, MissingExtraError
from ao_core.schema import (
    ANY,
    COUNT,
    FINITE,
    SHAPE,
    TEXT,
    Fields,
    Items,
    OneOf,
    Optional,
    SchemaError,
    Table,
    Text,
    check,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ParameterRecord", "Report"]

_NUMBER = OneOf((COUNT, FINITE), "a number")
#: what the JSON form of a report must be
_FIELDS = Fields(
    {
        "config": Table(ANY),
        "records": Items(
            Fields(
                {
                    "fqn": TEXT,
                    "status": Text("changed|unchanged|skipped", "changed, unchanged or skipped"),
                    "reason": TEXT,
                    "shape": SHAPE,
                    "bytes_before": COUNT,
                    "bytes_after": COUNT,
                },
                {
                    "spec": TEXT,
                    "kernel": TEXT,
                    "sqnr_db": Optional(
                        OneOf((FINITE, COUNT, Text("-?inf|nan", "a number, inf or nan")))
                    ),
                    "seconds": _NUMBER,
                    "tied": Items(TEXT),
                    "sparsity": Optional(_NUMBER),
                    "rows": Optional(COUNT),
                    "damping": Optional(_NUMBER),
                    "error_vs_rtn": Optional(_NUMBER),
                    "loss_before": Optional(_NUMBER),
                    "loss_after": Optional(_NUMBER),
                    "note": TEXT,
                },
            )
        ),
    },
    {"calibration": TEXT},
)
#: fields of records that only calibration fills: in JSON and tables where one of a report has them
CALIBRATED = ("rows", "damping", "error_vs_rtn", "loss_before", "loss_after", "note")


@dataclass(frozen=True)
class ParameterRecord:
    """The outcome for one parameter (tied parameters: one record, all names)."""

    #: fully qualified name, the first of tied ones
    fqn: str
    #: "changed", "unchanged" (nobody asked for it) or "skipped" (asked for, but it could not be done)
    status: str
    #: why it was left unchanged or skipped, or has another format than the configuration's; else empty
    reason: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    #: the format, as text; empty unless changed
    spec: str = ""
    #: the kernel that serves batch 1
    kernel: str = ""
    #: signal to quantization noise of the weight, dB; None unless changed
    sqnr_db: float | None = None
    seconds: float = 0.0
    #: other names of the same tensor
    tied: tuple[str, ...] = ()
    #: share of the elements that are not stored; None: all are
    sparsity: float | None = None
    #: rows of calibration data that were multiplied with it; None: it needed none
    rows: int | None = None
    #: share of the mean of the Hessian's diagonal that an algorithm added to it; None: it says nothing
    damping: float | None = None
    #: squared error of the outputs on the calibration data, over that of the same format rounded to nearest:
    #: below 1 is better; None: nothing to compare
    error_vs_rtn: float | None = None
    #: what was minimized over all calibration data, of the weight or of its block, before and after; None:
    #: nothing was
    loss_before: float | None = None
    loss_after: float | None = None
    #: what else there is to say of how it was done; else empty
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything `quantize_` did to a model."""

    #: the configuration as `config_to_dict` gives it
    config: dict[str, Any]
    #: one for each parameter of the model, in its order
    records: tuple[ParameterRecord, ...] = field(default_factory=tuple)
    #: how the inputs of weights were made that were calibrated in turn; else empty
    calibration: str = ""

    def __iter__(self) -> Iterator[ParameterRecord]:
        return iter(self.records)

    def with_status(self, status: str) -> list[ParameterRecord]:
        """The records of one status."""
        return [record for record in self.records if record.status == status]

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters before."""
        return sum(record.bytes_before for record in self.records)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters after."""
        return sum(record.bytes_after for record in self.records)

    @property
    def coverage(self) -> float:
        """Share of the bytes before that was changed, in percent."""
        covered = sum(record.bytes_before for record in self.with_status("changed"))
        return 100.0 * covered / max(self.bytes_before, 1)

    @property
    def seconds(self) -> float:
        """Time spent on all parameters."""
        return sum(record.seconds for record in self.records)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, totals included."""
        return {
            "config": self.config,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "coverage_percent": self.coverage,
            "seconds": self.seconds,
            "records": [_record_to_dict(record, self.silent) for record in self.records],
            **({"calibration": self.calibration} if self.calibration else {}),
        }

    @property
    def silent(self) -> frozenset[str]:
        """Those fields that calibration fills and no record has."""
        nothing = (None, "")
        return frozenset(
            name
            for name in CALIBRATED
            if all(getattr(record, name) in nothing for record in self.records)
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Inverse of `to_dict`; totals are computed again.

        Raises:
            ConfigError: `data` is no report; names the field.
        """
        try:
            check(data, _FIELDS, "report")
        except SchemaError as error:
            raise ConfigError(f"not a report: {error}") from error
        records = tuple(map(_record_from_dict, data["records"]))
        return cls(dict(data["config"]), records, str(data.get("calibration", "")))

    def to_json(self) -> str:
        """JSON text of `to_dict`; an SQNR that is not a finite number is the string "inf" or "nan"."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Inverse of `to_json`.

        Raises:
            ConfigError: `text` is no JSON of a report; names the field.
        """
        from ao_core.config import json_object  # imports torch, which `ao --help` does without

        return cls.from_dict(json_object(text, "report"))

    def __str__(self) -> str:
        from ao_core.report.text import report_text

        return report_text(self)

    def to_html(self, title: str = "Quantization report") -> str:
        """A page that needs no other file and no network: totals, plots and a table to search.

        Raises:
            MissingExtraError: Jinja2 is not installed (extra "report").
        """
        from ao_core.report.html import report_html

        return report_html(self, title)

    def plot(self) -> Figure:
        """A figure of weight SQNR and bytes for each changed parameter.

        Raises:
            MissingExtraError: matplotlib is not installed (extra "report").
        """
        from ao_core.report.plot import report_figure

        return report_figure(self)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame, so that neither's styles touch the other."""
        try:
            page = escape(self.to_html())
        except MissingExtraError:
            return f"<pre>{escape(str(self))}</pre>"
        style = "width:100%;height:40em;border:0"
        return (
            f'<iframe title="Quantization report" sandbox="allow-scripts" style="{style}" '
            f'srcdoc="{page}"></iframe>'
        )


def _record_to_dict(record: ParameterRecord, silent: frozenset[str]) -> dict[str, Any]:
    data = {key: value for key, value in asdict(record).items() if key not in silent}
    if record.sqnr_db is not None and not isfinite(record.sqnr_db):
        data["sqnr_db"] = str(record.sqnr_db)
    return data


def _record_from_dict(data: Mapping[str, Any]) -> ParameterRecord:
    known = {f.name for f in fields(ParameterRecord)}
    values = {key: value for key, value in data.items() if key in known}
    values["shape"] = tuple(values["shape"])
    values["tied"] = tuple(values.get("tied", ()))
    if values.get("sqnr_db") is not None:
        values["sqnr_db"] = float(values["sqnr_db"])
    return ParameterRecord(**values)
