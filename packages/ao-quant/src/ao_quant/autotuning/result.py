"""`AutoquantReport`: what was timed for each layer, what was chosen, and why."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import isfinite
from textwrap import fill, shorten
from typing import Any

from ao_core import Config, FqnToConfig, Report, config_to_dict
from ao_core.ext.reports import aligned
from ao_quant.planning.text import LOSSES, config_text

__all__ = ["AutoquantReport", "Exchange", "Layer", "Timing", "Whole"]

#: of a line of the text
_WIDTH = 120
#: of whole models, exchanges and reasons of parameters that stay, so that the text has at most 30 lines; the
#: object has all
_WHOLES, _EXCHANGES, _KEPT = 12, 5, 3
_NAME = 45


@dataclass(frozen=True)
class Timing:
    """One candidate for a layer."""

    #: None: dense
    config: Config | None
    #: the 10th percentile for all calls of the layer; None where it was not timed
    seconds: float | None
    #: why the layer cannot have it; empty where it can
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
    #: index of the format chosen
    picked: int
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

    def can_have(self, config: Config | None) -> bool:
        """Whether a format was timed."""
        return any(t.config == config and t.seconds is not None for t in self.timings)

    def seconds_in(self, config: Config | None) -> float:
        """The time in a format that the layer can have."""
        return next(t.seconds or 0.0 for t in self.timings if t.config == config)


@dataclass(frozen=True)
class Whole:
    """The whole model by one choice of formats."""

    #: the recipe of all layers that can have it, "dense", or "mixed": some layers have been exchanged
    name: str
    #: None: dense
    config: FqnToConfig | None
    #: the 10th percentile, in rounds of all choices
    seconds: float
    #: KL divergence of the answers in nats per position, or their squared error over the sum of their squares
    loss: float
    #: why it was not chosen; empty for the one that was
    reason: str = ""


@dataclass(frozen=True)
class Exchange:
    """Layers that are called alike, tried in another format."""

    names: tuple[str, ...]
    #: formats; None: dense
    before: Config | None
    after: Config | None
    #: of the whole model: its time before over that after, in interleaved rounds; None where it was not timed
    speedup: float | None
    #: of the answers afterwards; None: more than is allowed
    loss: float | None
    #: why it was not taken; empty if it was
    reason: str


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
    #: what was tried to make the best recipe for all layers faster
    exchanges: tuple[Exchange, ...] = ()
    #: "kl" or "output": what losses are; over how many positions; and how much is allowed
    measure: str = "output"
    positions: int = 0
    max_loss: float = 0.0
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
                    "config": _to_dict(each.config),
                    "loss": each.loss if isfinite(each.loss) else None,
                }
                for each in self.wholes
            ],
            "picked": self.picked,
            "exchanges": [
                {**vars(each), "before": _to_dict(each.before), "after": _to_dict(each.after)}
                for each in self.exchanges
            ],
            "measure": self.measure,
            "positions": self.positions,
            "max_loss": self.max_loss,
            "layers": [_layer_to_dict(layer) for layer in self.layers],
            "kept": [list(pair) for pair in self.kept],
            "report": None if self.report is None else self.report.to_dict(),
        }

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        blocks = []
        if self.wholes:
            fastest = sorted(
                range(1, len(self.wholes)), key=lambda place: self.wholes[place].seconds
            )
            shown = {0, self.picked, *fastest[: _WHOLES - 2]}
            rows = [
                (
                    _short(each.name),
                    _time(each.seconds),
                    f"{self.wholes[0].seconds / each.seconds:.2f}×" if each.seconds else "",
                    f"{each.loss:.3g}" if isfinite(each.loss) else "",
                    "chosen" if place == self.picked else each.reason,
                )
                for place, each in enumerate(self.wholes)
                if place in shown
            ]
            header = ("whole model", "time", "speed", LOSSES[self.measure], "")
            table = aligned([header, *rows], right=(1, 2, 3))
            blocks.append("\n".join([table, *_more(len(self.wholes) - len(shown), "slower ones")]))
        if self.exchanges:
            # the ones taken first; what was tried and did not pay says less
            tried = sorted(self.exchanges, key=lambda each: bool(each.reason))
            lines = [_line(_exchange(each)) for each in tried[:_EXCHANGES]]
            lines += _more(len(tried) - _EXCHANGES, "more")
            blocks.append("\n".join(["exchanges:", *lines]))
        if self.kept:
            counts = Counter(reason for _, reason in self.kept)
            kept = [f"{count} × {reason}" for reason, count in counts.most_common(_KEPT)]
            blocks.append("\n".join([f"as they are ({len(self.kept)}):", *map(_line, kept)]))
        return "\n\n".join([*blocks, fill(self._totals(), _WIDTH)])

    def _totals(self) -> str:
        count = sum(layer.picked > 0 for layer in self.layers)
        cached = sum(layer.cached for layer in self.layers)
        return (
            f"{count} of {len(self.layers)} layers quantized, on {self.machine['device']}, "
            f"{self.machine['threads']} thread(s); losses over {self.positions} position(s); times of "
            f"{cached} layers were known"
        )


def _to_dict(config: Config | None) -> dict[str, Any] | None:
    return None if config is None else config_to_dict(config)


def _layer_to_dict(layer: Layer) -> dict[str, Any]:
    return {
        "fqn": layer.fqn,
        "tied": list(layer.tied),
        "shape": list(layer.shape),
        "uses": list(layer.uses),
        "picked": layer.picked,
        "cached": layer.cached,
        "timings": [
            {
                "config": _to_dict(timing.config),
                "seconds": timing.seconds,
                "reason": timing.reason,
            }
            for timing in layer.timings
        ],
    }


def _exchange(each: Exchange) -> str:
    """What was exchanged in how many layers, and what came of it."""
    more = f" and {len(each.names) - 1} more" if len(each.names) > 1 else ""
    text = f"{each.names[0]}{more}: {_short(config_text(each.before))} → {_short(config_text(each.after))}"
    if each.speedup is not None:
        text += f", {each.speedup:.2f}×"
    return f"{text}: {each.reason or 'taken'}"


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _line(text: str) -> str:
    """A line below a title, cut where it is too long."""
    return "  " + shorten(text, _WIDTH - 2, placeholder=" …")


def _more(count: int, what: str) -> list[str]:
    """The line for those that are not shown; none if all are."""
    return [f"  and {count} {what}"] if count > 0 else []


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"
