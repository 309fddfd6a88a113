"""What `recommend` found: each recipe with its size, quality and time, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from ao_core import Config, config_to_json
from ao_core.ext import ConfigError
from ao_core.ext.reports import aligned, size_text
from ao_quant.planning.result import QuantizationPlan
from ao_quant.planning.text import LOSSES, config_text

__all__ = ["Compared", "Recommendation", "pick"]

#: speeds that differ by less than this factor are a tie, which the smaller loss decides
_TIE = 1.1
#: characters of a name
_NAME = 60
_SPOKEN = {"kl": "nats", "output": "noise / signal"}


@dataclass(frozen=True)
class Compared:
    """A model in one recipe, next to the dense one; what was not measured is None."""

    #: None: dense
    config: Config | None
    #: of all parameters
    bytes: int
    #: "kl": KL(dense ‖ this) in nats per position; "output": squared error of the answers over their squares
    loss: float | None = None
    #: share of the positions at which both have the same likeliest answer; None: answers are no logits
    agreement: float | None = None
    #: of one use
    seconds: float | None = None
    #: how many times as fast as dense, the median of the ratios within rounds
    speedup: float | None = None
    #: why it is, or is not, the one to take
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the recipe; of a plan its hash, of another configuration the beginning of its text."""
        if isinstance(self.config, QuantizationPlan):
            return f"plan {self.config.hash}"
        return shorten(config_text(self.config), _NAME, placeholder="…")


@dataclass(frozen=True)
class Recommendation:
    """Recipes for a model, compared; `str()` is a table. See `recommend`."""

    #: dense first
    rows: tuple[Compared, ...]
    #: the place of the one to take
    picked: int
    #: "kl" or "output"
    measure: str
    #: what one use of the model is, such as "call" or "token"
    unit: str

    @property
    def chosen(self) -> Compared:
        """The one to take."""
        return self.rows[self.picked]

    @property
    def config(self) -> Config | None:
        """Its configuration, for `quantize_`; None: the model is best left dense."""
        return self.chosen.config

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON, which `quantize_`, `ao quantize --config` and `AoConfig` take.

        Raises:
            ConfigError: no recipe is recommended.
        """
        if self.config is None:
            raise ConfigError(
                f"path={str(path)!r}: there is no configuration to write, the model is best left dense: "
                f"{self.chosen.reason}"
            )
        Path(path).write_text(config_to_json(self.config) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """All rows, for JSON."""
        rows = [{**asdict(replace(row, config=None)), "config": row.name} for row in self.rows]
        return {"measure": self.measure, "unit": self.unit, "picked": self.picked, "rows": rows}

    def __str__(self) -> str:
        header = (
            "recipe",
            "size",
            LOSSES[self.measure],
            "same top-1",
            f"{self.unit}s/s",
            "× dense",
            "",
        )
        cells = [_cells(row, i == self.picked) for i, row in enumerate(self.rows)]
        lines = [f"{row.name}: {row.reason}" for row in self.rows[1:] if ": " in row.reason]
        if self.config is None:
            lines.append(f"dense: {self.chosen.reason}")
        return "\n".join([aligned([header, *cells], right=range(1, 6)), "", *lines])


def _cells(row: Compared, is_picked: bool) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rate = None if row.seconds is None else 1 / row.seconds
    return (
        row.name,
        size_text(row.bytes),
        text(row.loss, ".3g") if row.config is not None else "",
        text(row.agreement, ".1%") if row.config is not None else "",
        text(rate, ".3g"),
        text(row.speedup, ".2f"),
        "recommended" if is_picked else row.reason.partition(":")[0],
    )


def pick(
    rows: Sequence[Compared], budget: int | None, max_loss: float, measure: str
) -> tuple[tuple[Compared, ...], int]:
    """The rows with reasons, and the place of the one to take.

    Args:
        rows: dense first; those with a reason are not taken.
        budget: bytes; of what fits, the one with the least loss is taken. None: the fastest of those within
            `max_loss`; where speeds hardly differ, the one with the least loss.
        max_loss: see `budget`.
        measure: of the losses.
    """
    told = [replace(row, reason=row.reason or _unfit(row, budget, max_loss)) for row in rows]
    fitting = [i for i, row in enumerate(told) if not row.reason]
    if budget is not None:
        best = min(fitting, key=lambda i: (_loss(told[i]), told[i].bytes))
        what = f"of what fits into {size_text(budget)}, it loses least"
        other = "loses more"
    else:
        speed = max(told[i].speedup or 0.0 for i in fitting)
        best = min(
            (i for i in fitting if (told[i].speedup or 0.0) * _TIE >= speed),
            key=lambda i: (_loss(told[i]), told[i].bytes),
        )
        what = (
            f"of those that lose at most {max_loss:g} {_SPOKEN[measure]}, it is the fastest, or loses "
            "least of those about as fast"
        )
        other = "slower, or loses more"
    return tuple(
        replace(row, reason=_sentence(row, rows[0], what, measure))
        if i == best
        else replace(row, reason=row.reason or other)
        for i, row in enumerate(told)
    ), best


def _loss(row: Compared) -> float:
    return 0.0 if row.loss is None else row.loss


def _unfit(row: Compared, budget: int | None, max_loss: float) -> str:
    if budget is not None:
        return "too large" if row.bytes > budget else ""
    if not _loss(row) <= max_loss:
        return "loses too much"
    return ""


def _sentence(row: Compared, dense: Compared, what: str, measure: str) -> str:
    if row.config is None:
        return f"{what}, and loses nothing"
    parts = [
        f"{what}: {_loss(row):.2g} {_SPOKEN[measure]}",
        f"{size_text(row.bytes)} of {size_text(dense.bytes)}",
    ]
    if row.agreement is not None:
        parts.append(f"the same likeliest answer at {row.agreement:.1%} of the positions")
    if row.speedup is not None:
        parts.append(f"{row.speedup:.2f} times as fast as dense")
    return ", ".join(parts)
