"""`AutoquantReport`: what was timed for each layer, what was chosen, and why."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ao_core.config import Config, FqnToConfig, config_to_dict
from ao_core.report import Report
from ao_core.report.text import aligned, decibels, shape_text
from ao_quant.planning.text import config_text

__all__ = ["AutoquantReport", "Layer", "Timing"]

_HEADER = ("parameter", "shape", "dense", "chosen", "time", "speed", "SQNR", "why")
_RIGHT = (2, 4, 5, 6)


@dataclass(frozen=True)
class Timing:
    """One candidate for a layer."""

    #: None: dense
    config: Config | None
    #: the 10th percentile for all calls of the layer; None where it was not timed
    seconds: float | None
    #: of the layer's output, dB; None for dense and where nobody had to know
    sqnr_db: float | None = None
    #: why it was not chosen; empty for the one that was
    reason: str = ""


@dataclass(frozen=True)
class Layer:
    """A parameter with the candidates that were compared (tied ones: one layer, all names)."""

    fqn: str
    shape: tuple[int, ...]
    #: how it is called: what `ao_quant.autotuning.calls.Use.describe` says
    uses: tuple[dict[str, Any], ...]
    #: dense first
    timings: tuple[Timing, ...]
    #: index of the timing chosen
    picked: int
    #: why it was chosen
    reason: str
    #: whether the times come from the disk
    cached: bool = False
    tied: tuple[str, ...] = ()

    @property
    def chosen(self) -> Timing:
        """The candidate chosen."""
        return self.timings[self.picked]

    @property
    def speedup(self) -> float:
        """Time of the dense layer over that of the one chosen."""
        dense, chosen = self.timings[0].seconds, self.chosen.seconds
        return dense / chosen if dense and chosen else 1.0


@dataclass(frozen=True)
class AutoquantReport:
    """What `autoquant` measured and did."""

    layers: tuple[Layer, ...]
    #: (parameter, why it was not considered)
    kept: tuple[tuple[str, str], ...]
    #: device, threads and versions
    machine: dict[str, Any]
    #: that of `quantize_`; None where nothing was applied
    report: Report | None = None

    @property
    def config(self) -> FqnToConfig:
        """What was chosen, as a configuration for `quantize_`."""
        entries = {layer.fqn: layer.chosen.config for layer in self.layers}
        return FqnToConfig({**entries, "*": None})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "machine": self.machine,
            "config": config_to_dict(self.config),
            "layers": [_layer_to_dict(layer) for layer in self.layers],
            "kept": [list(pair) for pair in self.kept],
            "report": None if self.report is None else self.report.to_dict(),
        }

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = [_row(layer) for layer in self.layers]
        blocks = [aligned([_HEADER, *rows], right=_RIGHT)] if rows else []
        if self.kept:
            counts = Counter(reason for _, reason in self.kept)
            lines = [f"  {count} × {reason}" for reason, count in counts.most_common()]
            blocks.append("\n".join([f"as they are ({len(self.kept)}):", *lines]))
        return "\n\n".join([*blocks, self._totals()])

    def _totals(self) -> str:
        dense = sum(layer.timings[0].seconds or 0.0 for layer in self.layers)
        chosen = sum(layer.chosen.seconds or 0.0 for layer in self.layers)
        faster = sum(layer.picked > 0 for layer in self.layers)
        cached = sum(layer.cached for layer in self.layers)
        return (
            f"{faster} of {len(self.layers)} layers are faster quantized: {_time(dense)} → "
            f"{_time(chosen)} for all of them, timed one by one on {self.machine['device']}, "
            f"{self.machine['threads']} thread(s); times of {cached} were known"
        )


def _layer_to_dict(layer: Layer) -> dict[str, Any]:
    return {
        "fqn": layer.fqn,
        "tied": list(layer.tied),
        "shape": list(layer.shape),
        "uses": list(layer.uses),
        "picked": layer.picked,
        "reason": layer.reason,
        "cached": layer.cached,
        "timings": [
            {
                "config": None if timing.config is None else config_to_dict(timing.config),
                "seconds": timing.seconds,
                "sqnr_db": None if timing.sqnr_db is None else round(timing.sqnr_db, 3),
                "reason": timing.reason,
            }
            for timing in layer.timings
        ],
    }


def _row(layer: Layer) -> tuple[str, ...]:
    chosen = layer.chosen
    return (
        " = ".join((layer.fqn, *layer.tied)),
        shape_text(layer.shape),
        _time(layer.timings[0].seconds),
        config_text(chosen.config),
        _time(chosen.seconds),
        f"{layer.speedup:.2f}×",
        decibels(chosen.sqnr_db),
        layer.reason,
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"
