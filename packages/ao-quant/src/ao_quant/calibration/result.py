"""What calibration has seen: of each weight the state of its observer, and the configuration that follows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ao_core import Spec
from ao_core.ext import QuantizationError
from ao_core.ext.calibration import config_of
from ao_core.ext.quantizing import Decision
from ao_quant.calibration.observers import (
    OBSERVERS,
    Observed,
    Observer,
    observe,
    qparams,
    steps_are_wide,
)
from ao_quant.configs import StaticConfig

__all__ = ["Calibration", "Watched", "config_of", "outliers_text"]


@dataclass
class Watched:
    """A weight whose activations are observed."""

    config: StaticConfig
    state: Observed

    @classmethod
    def start(cls, config: StaticConfig) -> Watched:
        """Nothing seen yet."""
        return cls(config, OBSERVERS[config.observer].start())

    @property
    def observer(self) -> Observer:
        """How it is observed."""
        return OBSERVERS[self.config.observer]

    @property
    def act(self) -> Spec:
        """The format of the activations."""
        act = self.config.weight_format(torch.float32).spec.act
        assert act is not None
        return act

    @property
    def has_outliers(self) -> bool:
        """Whether one scale leaves nothing of most values, in a format that has evenly spaced ones."""
        return self.config.dynamic() is not None and steps_are_wide(self.state, self.act)

    def qparams(self) -> tuple[float, int | None]:
        """Scale and zero point by what was seen."""
        return qparams(self.state, self.observer, self.act, self.config.percentile)


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
        return sum(each.state.nbytes for each in self.watched.values())

    @property
    def unseen(self) -> list[str]:
        """Weights that were multiplied with nothing yet."""
        return [name for name, each in self.watched.items() if not each.state.count]

    @property
    def outliers(self) -> list[str]:
        """Weights whose activations have outliers: one scale would leave nothing of most values."""
        return [n for n, each in self.watched.items() if each.state.count and each.has_outliers]

    def note(self, name: str, number: int, x: Tensor) -> None:
        """Observe activations of a weight.

        Raises:
            QuantizationError: they have NaN or inf; names the weight.
        """
        each = self.watched[name]
        try:
            each.state = observe(each.state, x)
        except QuantizationError as error:
            raise QuantizationError(
                f"the activations of {name} cannot be observed, {error}; find out where the model makes "
                "them, or leave the layer out"
            ) from error

    def decided(self, outliers: str = "static") -> list[Decision]:
        """The plans with what was found; those of weights that saw nothing keep them.

        `outliers`: as for `ao_quant.convert`.
        """
        done = []
        for decide in self.decisions:
            each = self.watched.get(decide.fqn)
            if each is None:
                done.append(decide)
            elif not each.state.count:
                done.append(replace(decide, config=None, reason="it saw no data in calibration"))
            elif outliers != "static" and each.has_outliers:
                config = each.config.dynamic() if outliers == "dynamic" else None
                done.append(replace(decide, config=config, reason=outliers_text(each.state)))
            else:
                done.append(replace(decide, config=each.config.calibrated(*each.qparams())))
        return done

    def __str__(self) -> str:
        lines = []
        for name, each in self.watched.items():
            seen = each.state
            text = "no data yet"
            if seen.count:
                scale, zero_point = each.qparams()
                text = f"{seen.count:,} values from {seen.range.low:.4g} to {seen.range.high:.4g}, "
                text += f"scale {scale:.4g}" + (
                    "" if zero_point is None else f", zero point {zero_point}"
                )
                text += f"; outliers: mean magnitude {seen.typical:.4g}" * each.has_outliers
            lines.append(f"{name} ({each.config.observer}): {text}")
        return "\n".join([*lines, f"{self.nbytes:,} bytes"])


def outliers_text(state: Observed) -> str:
    """The sentence on activations with outliers."""
    low, high = state.range
    return (
        f"its inputs have outliers, from {low:.4g} to {high:.4g} where the mean magnitude is "
        f"{state.typical:.3g}: one scale for all would round most of them to 0"
    )
