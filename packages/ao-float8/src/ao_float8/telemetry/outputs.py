"""Where records go: lines of JSON, TensorBoard, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_core.ext import ConfigError, MissingExtraError
from ao_float8.telemetry.measure import PrecisionRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NUMBERS", "JsonLines", "TensorBoard", "records_figure"]

#: the numbers of a record that are plotted
NUMBERS = ("underflow_percent", "saturation_percent", "sqnr_db", "amax", "scale_min", "scale_max")


class JsonLines:
    """Appends one line for each record to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def look(self, record: PrecisionRecord) -> None:
        """Write a record; a run that dies loses none."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()


class TensorBoard:
    """Writes the numbers of each record as scalars "layer/matmul/tensor/number"."""

    def __init__(self, writer: Any) -> None:
        self._own = isinstance(writer, (str, Path))
        self._writer = _summary_writer(writer) if self._own else writer

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        if self._own:
            self._writer.close()

    def look(self, record: PrecisionRecord) -> None:
        """Write a record."""
        tag = f"{record.layer}/{record.matmul}/{record.tensor}"
        for number in NUMBERS:
            self._writer.add_scalar(f"{tag}/{number}", getattr(record, number), record.step)


def _summary_writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        purpose = "writing telemetry for TensorBoard"
        raise MissingExtraError("tensorboard", "ao-float8[tensorboard]", purpose) from error
    return SummaryWriter(str(folder))  # type: ignore[no-untyped-call,unused-ignore]


def records_figure(records: Sequence[PrecisionRecord], number: str, tensor: str) -> Figure:
    """A line for each layer and matmul over the steps."""
    if number not in NUMBERS:
        raise ConfigError(f"field={number!r}: use one of {', '.join(NUMBERS)}")
    lines: dict[str, list[PrecisionRecord]] = {}
    for record in records:
        if record.tensor == tensor:
            lines.setdefault(f"{record.layer}, {record.matmul}", []).append(record)
    if not lines:
        known = sorted({record.tensor for record in records})
        raise ConfigError(
            f"tensor={tensor!r} has no records; there are some of: {', '.join(known) or 'nothing'}"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "ao-float8[plot]", "plotting telemetry") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, line in lines.items():
        axes.plot([r.step for r in line], [getattr(r, number) for r in line], ".-", label=label)
    axes.set(xlabel="step", ylabel=f"{number} of {tensor}")
    axes.legend(fontsize="small")
    return figure
