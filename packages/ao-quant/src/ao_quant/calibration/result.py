"""What calibration has seen: of each weight the state of its observer, and the configuration that follows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ao_core import Config
from ao_core.ext import QuantizationError
from ao_core.ext.calibration import Statistics, config_of, matrices
from ao_core.ext.quantizing import Decision
from ao_quant.calibration.judging import ROWS, settled
from ao_quant.calibration.observers import OBSERVERS, Observed, observe, qparams
from ao_quant.configs import StaticConfig

__all__ = ["Calibration", "Watched", "config_of", "found_qparams"]


def found_qparams(config: StaticConfig, state: Observed) -> tuple[float, int | None]:
    """Scale and zero point by what was seen of the activations of a weight."""
    act = config.weight_format(torch.float32).spec.act
    assert act is not None
    return qparams(state, OBSERVERS[config.observer], act, config.percentile)


@dataclass
class Watched:
    """A weight whose activations are observed."""

    config: StaticConfig
    state: Observed
    #: some rows of the activations
    rows: Statistics = field(default_factory=lambda: Statistics(ROWS))

    @classmethod
    def start(cls, config: StaticConfig) -> Watched:
        """Nothing seen yet."""
        return cls(config, OBSERVERS[config.observer].start())

    def qparams(self) -> tuple[float, int | None]:
        """Scale and zero point by what was seen."""
        return found_qparams(self.config, self.state)

    @property
    def nbytes(self) -> int:
        """Memory of what was seen."""
        return self.state.nbytes + self.rows.nbytes


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
        return [name for name, each in self.watched.items() if not each.state.count]

    def note(self, name: str, number: int, x: Tensor) -> None:
        """Observe activations of a weight.

        Raises:
            QuantizationError: they have NaN or inf; names the weight.
        """
        each = self.watched[name]
        try:
            each.state = observe(each.state, x)
            each.rows = each.rows.absorb(x)
        except QuantizationError as error:
            raise QuantizationError(
                f"the activations of {name} cannot be observed, {error}; find out where the model makes "
                "them, or leave the layer out"
            ) from error

    def decided(self) -> tuple[list[Decision], dict[str, Config | None]]:
        """The plans with what was found, and what weights with outliers get, by name.

        Weights that saw nothing are kept.
        """
        done, outliers = [], dict[str, Config | None]()
        for entry in self.decisions:
            each = self.watched.get(entry.fqn)
            if each is None:
                done.append(entry)
            elif not each.state.count:
                done.append(replace(entry, config=None, reason="it saw no data in calibration"))
            else:
                scaled = each.config.calibrated(*each.qparams())
                target = entry.owners[0]
                weight = matrices(entry.tensor.detach(), target)
                config, reason = settled(weight, each.rows.values, scaled, target)
                if reason:
                    outliers[entry.fqn] = config
                done.append(replace(entry, config=config, reason=reason or entry.reason))
        return done, outliers

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
            lines.append(f"{name} ({each.config.observer}): {text}")
        return "\n".join([*lines, f"{self.nbytes:,} bytes"])
