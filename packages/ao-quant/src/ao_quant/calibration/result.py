"""What calibration has seen: of each weight the state of its observer, and the configuration that follows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

from torch import Tensor

from ao_core import Config
from ao_core.ext import QuantizationError
from ao_core.ext.calibration import (
    Statistic,
    Statistics,
    config_of,
    inputs_of,
    matrices,
    matrix_shape,
)
from ao_core.ext.quantizing import Decision
from ao_quant.calibration.judging import settled
from ao_quant.calibration.observers import Observed, merged
from ao_quant.calibration.rows import ROWS
from ao_quant.calibration.stated import found_scales, is_of_experts, observed, seen_by
from ao_quant.configs import StaticConfig

__all__ = ["Calibration", "Watched", "config_of", "needs"]


def needs(config: StaticConfig) -> tuple[Statistic, ...]:
    """What is kept of the activations of a weight: what its observer sees, and some rows."""
    return (observed(config.observer), *ROWS)


@dataclass
class Watched:
    """A weight whose activations are observed."""

    config: StaticConfig
    #: of the activations of each matrix of the weight; see `matrices`
    statistics: list[Statistics]
    #: whether each matrix has a scale of its own
    of_experts: bool = False

    @classmethod
    def start(cls, config: StaticConfig, entry: Decision) -> Watched:
        """Nothing seen yet."""
        target = entry.owners[0]
        count = matrix_shape(tuple(entry.tensor.shape), target)[0]
        return cls(config, [Statistics(needs(config))] * count, is_of_experts(target))

    @property
    def state(self) -> Observed:
        """What was seen of all matrices."""
        return reduce(
            merged, (seen_by(each.values) for each in self.statistics if each.rows), Observed()
        )

    def scaled(self) -> StaticConfig:
        """The configuration with scales by what was seen, of those experts that saw any rows."""
        known = [each for each in self.statistics if each.rows]
        return found_scales(self.config, known, of_experts=self.of_experts)

    @property
    def rows(self) -> int:
        """Rows that were seen, of all matrices."""
        return sum(each.rows for each in self.statistics)

    @property
    def nbytes(self) -> int:
        """Memory of what was seen."""
        return sum(each.nbytes for each in self.statistics)

    def __str__(self) -> str:
        if not self.rows:
            return "no data yet"
        found: Any = self.scaled()
        low, high = self.state.range
        text = f"{self.state.count:,} values from {low:.4g} to {high:.4g}, "
        text += f"scale {_span(found.act_scale, '.4g')}"
        point = getattr(found, "act_zero_point", None)
        return text if point is None else f"{text}, zero point {_span(point, 'd')}"


def _span(values: Any, form: str) -> str:
    """A value, or the least and greatest of those of experts."""
    ends = sorted({min(values), max(values)}) if isinstance(values, tuple) else [values]
    return " to ".join(f"{each:{form}}" for each in ends)


class Decided(NamedTuple):
    """What becomes of a prepared model."""

    decisions: list[Decision]
    #: by name, what weights with outliers get
    outliers: dict[str, Config | None]
    #: by name, what is not as it would be with more data
    notes: dict[str, str]


@dataclass
class Calibration:
    """What `prepare` decided for each parameter, and what was seen since; `str()` is a table.

    It goes with the model, which `calibrate` and `convert` are called with.
    """

    #: for every parameter of the model
    decisions: tuple[Decision, ...]
    #: by name, the weights whose activations get static scales
    watched: dict[str, Watched] = field(default_factory=dict)
    #: whether a `calibrate` context is open
    active: bool = False

    @property
    def nbytes(self) -> int:
        """Memory of all states."""
        return sum(each.nbytes for each in self.watched.values())

    @property
    def unseen(self) -> list[str]:
        """Weights that were multiplied with nothing yet."""
        return [name for name, each in self.watched.items() if not each.rows]

    def note(self, name: str, number: int, x: Tensor) -> None:
        """Observe activations of a weight.

        Raises:
            QuantizationError: they have NaN or inf; names the weight.
        """
        each = self.watched[name]
        try:
            each.statistics[number] = each.statistics[number].absorb(x)
        except QuantizationError as error:
            raise QuantizationError(
                f"the activations of {name} cannot be observed, {error}; find out where the model makes "
                "them, or leave the layer out"
            ) from error

    def decided(self) -> Decided:
        """The plans with what was found; weights that saw nothing are kept."""
        done, outliers, notes = [], dict[str, Config | None](), dict[str, str]()
        for entry in self.decisions:
            each = self.watched.get(entry.fqn)
            if each is None:
                done.append(entry)
            elif not each.rows:
                done.append(replace(entry, config=None, reason="it saw no data in calibration"))
            else:
                inputs, target = inputs_of(entry, tuple(each.statistics)), entry.owners[0]
                weight = matrices(entry.tensor.detach(), target)
                config, reason = settled(weight, inputs.statistics, each.config, target)
                if reason:
                    outliers[entry.fqn] = config
                if inputs.note:
                    notes[entry.fqn] = inputs.note
                done.append(replace(entry, config=config, reason=reason or entry.reason))
        return Decided(done, outliers, notes)

    def __str__(self) -> str:
        lines = [f"{name} ({each.config.observer}): {each}" for name, each in self.watched.items()]
        return "\n".join([*lines, f"{self.nbytes:,} bytes"])
