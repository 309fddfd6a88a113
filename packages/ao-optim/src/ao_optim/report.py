"""Bytes of state per parameter group, next to those of AdamW in float32."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext import checked
from ao_core.ext.kernels import local_shard
from ao_core.ext.reports import aligned, size_text

__all__ = ["GroupRecord", "StateReport", "state_report"]

#: bytes of state per parameter of AdamW in float32
_FULL = 8


@dataclass(frozen=True)
class GroupRecord:
    """The size of the state of one parameter group on this rank."""

    group: int
    parameters: int
    elements: int
    #: elements whose state is quantized
    quantized: int
    state_bytes: int
    adamw_bytes: int

    @property
    def bytes_per_element(self) -> float:
        """Bytes of state per element."""
        return self.state_bytes / max(self.elements, 1)


@dataclass(frozen=True)
class StateReport:
    """Bytes of state of every group; prints as a table."""

    #: name of its class
    optimizer: str
    #: one for each group of parameters
    groups: tuple[GroupRecord, ...]

    @property
    def total(self) -> GroupRecord:
        """The sum over the groups, as group -1."""
        names = ("parameters", "elements", "quantized", "state_bytes", "adamw_bytes")
        return GroupRecord(-1, *(sum(getattr(g, name) for g in self.groups) for name in names))

    def to_json(self) -> str:
        """All figures as JSON."""
        found = {"optimizer": self.optimizer, "groups": [asdict(g) for g in self.groups]}
        return json.dumps({**found, "total": asdict(self.total)}, indent=1)

    def __str__(self) -> str:
        rows = [("group", "parameters", "elements", "quantized", "state", "AdamW", "bytes each")]
        for record in (*self.groups, self.total):
            name = "all" if record.group < 0 else str(record.group)
            share = f"{100 * record.quantized / max(record.elements, 1):.1f}%"
            sizes = size_text(record.state_bytes), size_text(record.adamw_bytes)
            counts = f"{record.parameters}", f"{record.elements}"
            rows.append((name, *counts, share, *sizes, f"{record.bytes_per_element:.3f}"))
        return f"{self.optimizer}\n{aligned(rows, right=range(1, 7))}"


@checked
def state_report(optimizer: torch.optim.Optimizer) -> StateReport:
    """The size of the state of any optimizer. A sharded optimizer reports this rank's state.

    Parameters that have no state yet (before the first step) count as elements without bytes.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        elements = quantized = state_bytes = 0
        for param in group["params"]:
            size = local_shard(param).numel()
            moments = [v for v in optimizer.state.get(param, {}).values() if isinstance(v, Tensor)]
            elements += size
            quantized += size * any(isinstance(moment, QTensor) for moment in moments)
            state_bytes += sum(map(_bytes, moments))
        full = _FULL * elements
        groups.append(
            GroupRecord(number, len(group["params"]), elements, quantized, state_bytes, full)
        )
    return StateReport(type(optimizer).__name__, tuple(groups))


def _bytes(moment: Any) -> int:
    if isinstance(moment, QTensor):
        return moment.stored_bytes
    part: Tensor = local_shard(moment)
    return part.numel() * part.element_size()
