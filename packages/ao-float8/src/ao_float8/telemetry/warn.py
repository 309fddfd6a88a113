"""Warnings by name of the layer, once for each."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from ao_core import ComputeWeight
from ao_core.ext.quantizing import warn_caller
from ao_float8.telemetry.measure import PrecisionRecord

__all__ = ["NonFiniteWarning", "StepWarning", "UnderflowWarning", "Updates", "Watch"]


class UnderflowWarning(UserWarning):
    """Low precision turns too large a share of a gradient into zeros."""


class NonFiniteWarning(UserWarning):
    """An operand of a matmul has NaN or infinities; casts keep them."""


class StepWarning(UserWarning):
    """Telemetry takes several steps of training for one."""


class Updates:
    """Looks at the versions of weights, and warns once where they change within a step."""

    def __init__(self, layers: Collection[str]) -> None:
        self._layers = layers
        self._versions: dict[str, int] = {}

    def look(self, layer: str, weight: ComputeWeight, step: int) -> None:
        """Warn if the weight of a layer is not that of the layer's last call in this step."""
        if layer not in self._layers or weight.is_inference():
            return
        version = weight._version + weight.memory._version
        if self._versions.setdefault(layer, version) != version:
            self._layers = ()
            warn_caller(
                f"{layer}: its weight was updated, but telemetry is at step {step} still, and adds up what "
                "it sees: call telemetry.step() after each step of training",
                StepWarning,
            )

    def clear(self) -> None:
        """A step is over."""
        self._versions.clear()


class Watch:
    """Looks at records, and warns of a layer once."""

    def __init__(self, underflow_percent: float) -> None:
        self.underflow_percent = underflow_percent
        self._warned: set[tuple[type[Warning], str]] = set()

    def look(self, record: PrecisionRecord) -> None:
        """Warn of what is wrong with a record, if anything."""
        where = f"{record.layer}: {record.tensor} of the matmul {record.matmul}, step {record.step}"
        if record.nonfinite:
            text = f"{where}: {record.nonfinite} of {record.elements} elements are NaN or infinite"
            self._warn(NonFiniteWarning, record.layer, text)
        gradient = record.tensor == "grad_output"
        if gradient and record.underflow_percent > self.underflow_percent:
            text = (
                f"{where}: {record.underflow_percent:.1f}% of the elements become zero in "
                f"{record.spec}, more than {self.underflow_percent:g}%; "
                f"float8_fallback(model, {record.layer!r}) puts the layer back to high precision"
            )
            self._warn(UnderflowWarning, record.layer, text)

    def _warn(self, category: type[Warning], layer: str, text: str) -> None:
        if (category, layer) not in self._warned:
            self._warned.add((category, layer))
            warnings.warn(text, category, stacklevel=5)
