"""What was found out about each variant, as records that can be written as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ao_core import Report, __version__
from minilm_demo.latency import Latency
from minilm_demo.metrics import Quality


@dataclass(frozen=True)
class Layer:
    """One weight of a variant."""

    fqn: str
    #: "changed", "unchanged" or "skipped"
    status: str
    reason: str
    bytes_before: int
    bytes_after: int
    #: None unless changed
    sqnr_db: float | None
    kernel: str


@dataclass(frozen=True)
class Result:
    """Everything about one variant."""

    name: str
    summary: str
    memory_bytes: int
    disk_bytes: int
    quality: Quality
    layers: list[Layer]
    #: what quantizing took, on one thread
    seconds: float
    #: workload -> dtype of the activations ("fp32" or "bf16") -> latency
    latency: dict[str, dict[str, Latency]] = field(default_factory=dict)

    @property
    def weight_sqnr_db(self) -> float | None:
        """Median over the quantized weights; None where there are none."""
        found = [layer.sqnr_db for layer in self.layers if layer.sqnr_db is not None]
        return median(found) if found else None


def layers_of(report: Report) -> list[Layer]:
    """The weight matrices of a report; biases and norms are left out."""
    return [
        Layer(r.fqn, r.status, r.reason, r.bytes_before, r.bytes_after, r.sqnr_db, r.kernel)
        for r in report.records
        if len(r.shape) > 1
    ]


def environment() -> dict[str, Any]:
    """Machine and versions that the figures were measured with."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ao-core": __version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def to_json(results: list[Result], left_out: dict[str, str], about: dict[str, Any]) -> str:
    """JSON text; infinite figures become null."""
    data = {
        "about": about,
        "variants": [asdict(r) | {"weight_sqnr_db": r.weight_sqnr_db} for r in results],
        "left_out": left_out,
    }
    return json.dumps(_finite(data), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
