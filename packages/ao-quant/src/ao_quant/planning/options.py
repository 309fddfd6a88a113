"""A weight in every candidate format: what it takes, and what the model loses with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import Tensor

from ao_core import Config, QTensor, Skip
from ao_core.ext.calibration import Inputs
from ao_core.ext.quantizing import Decision
from ao_quant.planning.calibrated import layer_error, solved
from ao_quant.planning.gradients import Gradients, predicted_error
from ao_quant.planning.judging import Judge
from ao_quant.planning.measure import weight_error
from ao_quant.planning.result import Choice, Option
from ao_quant.planning.sizes import Files

__all__ = ["Maker", "error_by", "options_of"]

#: (weight, its parameter in a format) -> the error
Error = Callable[[Decision, QTensor], float]


@dataclass(frozen=True)
class Maker:
    """Weights in formats, each made once."""

    #: what was seen of the inputs of weights
    inputs: Any
    #: None: none is held, and each is made when it is asked for
    made: dict[tuple[str, Config], Tensor | Skip] | None = field(default_factory=dict)

    def asked(self, entry: Decision, config: Config) -> Tensor | Skip:
        """A weight in a format, or why it cannot have it."""
        key = (entry.fqn, config)
        if self.made is not None and key in self.made:
            return self.made[key]
        new = solved(entry, config, self.inputs.get(entry.fqn))
        if self.made is not None:
            self.made[key] = new
        return new

    def tensor(self, entry: Decision, config: Config) -> Tensor:
        """A weight in a format that it can have."""
        new = self.asked(entry, config)
        assert isinstance(new, Tensor)
        return new


def error_by(measure: str, judge: Judge | None, gradients: Gradients | None, inputs: Any) -> Error:
    """How the error of one weight is found."""

    def error(entry: Decision, new: QTensor) -> float:
        seen: Inputs | None = inputs.get(entry.fqn)
        if gradients is not None:
            # an answer that does not depend on a weight loses nothing with it
            return predicted_error(entry, new, gradients) or 0.0
        if measure == "layer" and (found := layer_error(entry, new, seen)) is not None:
            return found
        if judge is None or measure in ("weight", "layer"):
            return weight_error(entry.tensor.detach(), new)
        return judge.error([(entry.owners, new)])

    return error


def options_of(
    entry: Decision, configs: Sequence[Config], maker: Maker, files: Files, error_of: Error
) -> tuple[Choice, list[frozenset[str]]]:
    """A parameter in every format that can hold it, and who provides each."""
    size = files.size(entry.fqn, entry.tensor)
    options = [Option(None, size.total, size.data, 0.0)]
    refused, providers = [], [size.providers]
    for config in configs:
        new = maker.asked(entry, config)
        if not isinstance(new, QTensor):
            reason = new.reason if isinstance(new, Skip) else "its memory stays as it is"
            refused.append((config, reason))
            continue
        error = error_of(entry, new)
        if isfinite(error):
            size = files.size(entry.fqn, new)
            options.append(Option(config, size.total, size.data, error))
            providers.append(size.providers)
        else:
            refused.append((config, f"the error is {error}"))
    tied = tuple(owner.fqn for owner in entry.owners[1:])
    shape = tuple(entry.tensor.shape)
    return Choice(entry.fqn, shape, tuple(options), 0, tied, tuple(refused)), providers
