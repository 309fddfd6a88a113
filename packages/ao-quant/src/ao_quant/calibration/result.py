"""What calibration has seen: of each weight the state of its observer, and the configuration that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ao_core.config import FqnToConfig
from ao_core.errors import QuantizationError
from ao_core.spec import Spec
from ao_core.targets import Plan
from ao_quant.calibration.observers import OBSERVERS, Observed, Observer, observe, qparams
from ao_quant.configs import StaticConfig
from ao_quant.specs import format_of

__all__ = ["Calibration", "Watched", "config_of"]


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
        act = format_of(self.config).act
        assert act is not None
        return act

    def qparams(self) -> tuple[float, int | None]:
        """Scale and zero point by what was seen."""
        return qparams(self.state, self.observer, self.act, self.config.percentile)


def config_of(plans: Sequence[Plan]) -> FqnToConfig:
    """What is decided for each parameter as a configuration, by name."""
    return FqnToConfig({p.fqn: p.config for p in plans if p.config is not None} or {"*": None})


@dataclass
class Calibration:
    """What `prepare` decided for each parameter, and what was seen since; `str()` is a table.

    It goes with the model, which `calibrate` and `convert` are called with.
    """

    #: for every parameter of the model
    plans: tuple[Plan, ...]
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

    def note(self, name: str, x: Tensor) -> None:
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

    def decided(self) -> list[Plan]:
        """The plans with what was found; those of weights that saw nothing keep them."""
        done = []
        for plan in self.plans:
            each = self.watched.get(plan.fqn)
            if each is None:
                done.append(plan)
            elif each.state.count:
                done.append(replace(plan, config=each.config.calibrated(*each.qparams())))
            else:
                done.append(replace(plan, config=None, reason="it saw no data in calibration"))
        return done

    def __str__(self) -> str:
        lines = []
        for name, each in self.watched.items():
            seen = each.state
            text = "no data yet"
            if seen.count:
                scale, zero = each.qparams()
                text = f"{seen.count:,} values from {seen.range.low:.4g} to {seen.range.high:.4g}, "
                text += f"scale {scale:.4g}" + ("" if zero is None else f", zero point {zero}")
            lines.append(f"{name} ({each.config.observer}): {text}")
        return "\n".join([*lines, f"{self.nbytes:,} bytes"])
