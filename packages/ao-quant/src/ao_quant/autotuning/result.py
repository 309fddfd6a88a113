"""`AutoquantReport`: what was timed for each layer, what was chosen, and why."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from ao_core import Config, FqnToConfig, Report, config_to_dict
from ao_core.ext.reports import aligned, shape_text
from ao_quant.planning.text import config_text

__all__ = ["AutoquantReport", "Layer", "Timing", "Whole"]

#: of a line of the text
_WIDTH = 120
#: lines on layers, and reasons of parameters that stay; all are in the object
_LINES, _KEPT = 8, 3
_NAME = 45
_HEADER = ("whole model", "time", "speed", "error", "")


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
    #: of the layer's output on the example: over so many the SQNR was taken
    rows: int = 0

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
class Whole:
    """The whole model by one choice of formats."""

    #: the recipe of all layers that can have it, "dense", or "mixed": the choice of each layer
    name: str
    #: None: dense
    config: FqnToConfig | None
    #: the 10th percentile, in rounds of all choices
    seconds: float
    #: of the model's answer to the example, dB; None for dense
    sqnr_db: float | None
    #: why it was not chosen; empty for the one that was
    reason: str = ""


@dataclass(frozen=True)
class AutoquantReport:
    """What `autoquant` measured and did."""

    #: what was measured of each layer that was considered
    layers: tuple[Layer, ...]
    #: (parameter, why it was not considered)
    kept: tuple[tuple[str, str], ...]
    #: device, threads and versions
    machine: dict[str, Any]
    #: the whole model by each choice, dense first; none where no layer was considered
    wholes: tuple[Whole, ...] = ()
    #: index of the whole model chosen
    picked: int = 0
    #: that of `quantize_`; None where nothing was applied
    report: Report | None = None

    @property
    def config(self) -> FqnToConfig:
        """What was chosen, as a configuration for `quantize_`."""
        chosen = self.wholes[self.picked].config if self.wholes else None
        dense: dict[str, Config | None] = {layer.fqn: None for layer in self.layers}
        return chosen or FqnToConfig({**dense, "*": None})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "machine": self.machine,
            "config": config_to_dict(self.config),
            "wholes": [
                {
                    **vars(each),
                    "config": None if each.config is None else config_to_dict(each.config),
                }
                for each in self.wholes
            ],
            "picked": self.picked,
            "layers": [_layer_to_dict(layer) for layer in self.layers],
            "kept": [list(pair) for pair in self.kept],
            "report": None if self.report is None else self.report.to_dict(),
        }

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def one_row(self) -> tuple[str, ...]:
        """Layers whose SQNR is that of a single row, which is not a sample."""
        return tuple(layer.fqn for layer in self.layers if layer.rows == 1)

    def __str__(self) -> str:
        blocks = []
        if self.wholes:
            rows = [
                (
                    each.name if len(each.name) <= _NAME else each.name[: _NAME - 1] + "…",
                    _time(each.seconds),
                    f"{self.wholes[0].seconds / each.seconds:.2f}×" if each.seconds else "",
                    "" if each.sqnr_db is None else f"{each.sqnr_db:.1f} dB",
                    "chosen" if place == self.picked else each.reason,
                )
                for place, each in enumerate(self.wholes)
            ]
            blocks.append(aligned([_HEADER, *rows], right=(1, 2, 3)))
        alike: dict[tuple[Any, ...], list[Layer]] = {}
        for layer in self.layers:
            key = (layer.shape, layer.picked and layer.chosen.config, layer.reason)
            alike.setdefault(key, []).append(layer)
        groups = sorted(alike.values(), key=lambda group: -_dense_seconds(group))
        lines = [line for group in groups for line in _group(group).splitlines()]
        if len(lines) > _LINES:
            lines = [*lines[:_LINES], "… and more of them in `layers`"]
        if lines:
            blocks.append("\n".join(["layers by themselves:", *lines]))
        if self.kept:
            counts = Counter(reason for _, reason in self.kept)
            kept = [f"{count} × {reason}" for reason, count in counts.most_common(_KEPT)]
            blocks.append("\n".join([f"as they are ({len(self.kept)}):", *map(_indented, kept)]))
        return "\n\n".join([*blocks, *self._doubts(), fill(self._totals(), _WIDTH)])

    def _doubts(self) -> list[str]:
        """What a reader should know of the errors."""
        if not self.one_row:
            return []
        text = f"the error of {len(self.one_row)} layers is that of one row, which may be unusual"
        return [fill(text, _WIDTH)]

    def _totals(self) -> str:
        dense = sum(layer.timings[0].seconds or 0.0 for layer in self.layers)
        chosen = sum(layer.chosen.seconds or 0.0 for layer in self.layers)
        faster = sum(layer.picked > 0 for layer in self.layers)
        cached = sum(layer.cached for layer in self.layers)
        return (
            f"{faster} of {len(self.layers)} layers are faster quantized by themselves: {_time(dense)} → "
            f"{_time(chosen)} for all of them, on {self.machine['device']}, "
            f"{self.machine['threads']} thread(s); times of {cached} were known"
        )


def _dense_seconds(layers: list[Layer]) -> float:
    return sum(layer.timings[0].seconds or 0.0 for layer in layers)


def _layer_to_dict(layer: Layer) -> dict[str, Any]:
    return {
        "fqn": layer.fqn,
        "tied": list(layer.tied),
        "shape": list(layer.shape),
        "uses": list(layer.uses),
        "picked": layer.picked,
        "reason": layer.reason,
        "cached": layer.cached,
        "rows": layer.rows,
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


def _group(layers: list[Layer]) -> str:
    """Layers of one shape that fared alike: their names, the first ones spelled out, and what was chosen."""
    names = [" = ".join((layer.fqn, *layer.tied)) for layer in layers]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    dense, chosen = _dense_seconds(layers), sum(layer.chosen.seconds or 0.0 for layer in layers)
    text = f"{shape_text(layers[0].shape)}: {config_text(layers[0].chosen.config)}, {_time(dense)}"
    if layers[0].picked:
        least = min(layer.chosen.sqnr_db or 0.0 for layer in layers)
        text += f" → {_time(chosen)}, {dense / chosen:.2f}×, " if chosen else ", "
        text += f"{'at least ' if len(layers) > 1 else ''}{least:.1f} dB"
    title = fill(", ".join(names[:3]) + more, _WIDTH, break_on_hyphens=False)
    return f"{title}\n{_indented(f'{text}: {layers[0].reason}')}"


def _indented(text: str) -> str:
    """A line below a title, broken where it is too long."""
    return fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"
