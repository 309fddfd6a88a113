"""What pruning found: masks, new values where the method has some, and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ao_core.ext import ConfigError, json_object
from ao_core.ext.reports import aligned, left_alone, names, shape_text

__all__ = ["PruneRecord", "PruneReport", "Pruning"]

_HEADER = ("parameter", "shape", "pattern", "removed", "sparsity")
_RIGHT = (3, 4)


@dataclass(frozen=True)
class PruneRecord:
    """The outcome for one parameter (tied parameters: one record, all names)."""

    fqn: str
    #: "pruned", "unchanged" (nobody asked for it) or "skipped" (asked for, but it could not be done)
    status: str
    #: why it was kept or skipped
    reason: str
    shape: tuple[int, ...]
    #: as text; empty unless pruned
    pattern: str = ""
    #: elements, and how many of them the mask removes
    weights: int = 0
    removed: int = 0
    #: other names of the same tensor
    tied: tuple[str, ...] = ()
    #: rows of calibration data that were multiplied with it; None: the method needs none
    rows: int | None = None
    #: what is not as it would be with more data; else empty
    note: str = ""

    @property
    def sparsity(self) -> float:
        """The share that is removed."""
        return self.removed / max(self.weights, 1)


@dataclass(frozen=True)
class PruneReport:
    """One record for each parameter of the model; `str()` is a table."""

    #: "magnitude", "wanda", "sparsegpt", …
    method: str
    #: what shares were taken of: "row", "layer" or "model"
    scope: str
    #: one for each parameter, in the order of the model
    records: tuple[PruneRecord, ...]

    def with_status(self, status: str) -> list[PruneRecord]:
        """The records of one status."""
        return [record for record in self.records if record.status == status]

    @property
    def weights(self) -> int:
        """Elements of the parameters that were pruned."""
        return sum(record.weights for record in self.with_status("pruned"))

    @property
    def removed(self) -> int:
        """How many of them are removed."""
        return sum(record.removed for record in self.with_status("pruned"))

    @property
    def sparsity(self) -> float:
        """The share of them that is removed."""
        return self.removed / max(self.weights, 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, totals included."""
        return {
            "method": self.method,
            "scope": self.scope,
            "weights": self.weights,
            "removed": self.removed,
            "sparsity": self.sparsity,
            "records": [asdict(record) | {"sparsity": record.sparsity} for record in self.records],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PruneReport:
        """Inverse of `to_dict`; totals are computed again.

        Raises:
            ConfigError: `data` is no report.
        """
        try:
            records = tuple(map(_record_from_dict, data["records"]))
            return cls(str(data["method"]), str(data["scope"]), records)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a report: {type(error).__name__}: {error}") from error

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> PruneReport:
        """Inverse of `to_json`."""
        return cls.from_dict(json_object(text, "report"))

    def __str__(self) -> str:
        pruned = self.with_status("pruned")
        blocks = [aligned([_HEADER, *map(_row, pruned)], right=_RIGHT)] if pruned else []
        total = (
            f"{self.method}, by {self.scope}: {self.removed:,} of {self.weights:,} weights removed "
            f"({100 * self.sparsity:.2f}%) in {len(pruned)} of {len(self.records)} parameters"
        )
        if notes := [f"  {names(record)}: {record.note}" for record in pruned if record.note]:
            blocks.append("\n".join([f"notes ({len(notes)}):", *notes]))
        return "\n\n".join([*blocks, *left_alone(self), total])


@dataclass(frozen=True)
class Pruning:
    """Masks for a model, which `apply_masks` puts on it; `str()` is the report."""

    #: name of a parameter -> bool, of its shape: True for what stays
    masks: dict[str, Tensor]
    report: PruneReport
    #: name of a parameter -> its new values, where the method changes those that stay
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.report)


def _row(record: PruneRecord) -> tuple[str, ...]:
    removed, sparsity = f"{record.removed:,}", f"{100 * record.sparsity:.2f}%"
    return (names(record), shape_text(record.shape), record.pattern, removed, sparsity)


def _record_from_dict(data: Mapping[str, Any]) -> PruneRecord:
    values = {key: value for key, value in data.items() if key != "sparsity"}
    return PruneRecord(**values | {"shape": tuple(values["shape"]), "tied": tuple(values["tied"])})
