"""What `quantize_` did: one record a parameter, totals, and ways to look at them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ParameterRecord", "Report"]


@dataclass(frozen=True)
class ParameterRecord:
    """The outcome for one parameter (tied parameters: one record, all names)."""

    fqn: str
    #: "quantized", "kept" (nobody asked for it) or "skipped" (asked for, but it could not be done)
    status: str
    #: why it was kept or skipped; empty for quantized ones
    reason: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    #: the format, as text; empty unless quantized
    spec: str = ""
    #: the kernel that serves batch 1
    kernel: str = ""
    #: signal to quantization noise of the weight, dB; None unless quantized
    sqnr_db: float | None = None
    seconds: float = 0.0
    #: other names of the same tensor
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything `quantize_` did to a model."""

    config: dict[str, Any]
    records: tuple[ParameterRecord, ...] = field(default_factory=tuple)

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
        """Share of the bytes before that was quantized, in percent."""
        covered = sum(record.bytes_before for record in self.with_status("quantized"))
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
            "records": [asdict(record) for record in self.records],
        }

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)
