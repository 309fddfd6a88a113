"""A start in high precision: rounding begins after some steps of training."""

from __future__ import annotations

from typing import Any

from torch import nn

from ao_core.ext import AoError, ConfigError
from ao_core.ext.compute import delay_, prepared_weights

__all__ = ["Delay", "check_prepared"]


def check_prepared(model: nn.Module) -> None:
    """Raise `ConfigError` unless a weight of the model is prepared for training."""
    if not prepared_weights(model):
        raise ConfigError(
            "model: none of its weights is prepared for quantization-aware training; call "
            "quantize_(model, QATConfig(base)) first"
        )


class Delay:
    """Lets a prepared model train in high precision for some steps, and then as it will be deployed.

    Most of a training run can be spent without rounding; Liu et al. 2025 (arXiv:2502.02631) spend 90 % so.
    Under `torch.compile` the start of rounding compiles once more.

    Args:
        model: one whose weights `QATConfig` has prepared.
        steps: how many calls of `step` pass before rounding begins; 0: it begins at once.

    Raises:
        ConfigError: `steps` is negative, or no weight of the model is prepared.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        if steps < 0:
            raise ConfigError(f"steps={steps!r}: use 0 or more")
        check_prepared(model)
        self._model = model
        self.steps = steps
        self.done = 0
        delay_(model, self.waits)

    @property
    def waits(self) -> bool:
        """Whether the model still trains in high precision."""
        return self.done < self.steps

    def step(self) -> None:
        """To be called after each step of the optimizer."""
        self.done += 1
        if self.done == self.steps:
            delay_(self._model, False)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from."""
        return {"steps": self.steps, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another left off.

        Raises:
            AoError: `state` is not that of a `Delay`.
        """
        if set(state) != {"steps", "done"}:
            raise AoError(f"state={state!r}: the state of a Delay has 'steps' and 'done'")
        self.steps, self.done = state["steps"], state["done"]
        delay_(self._model, self.waits)
