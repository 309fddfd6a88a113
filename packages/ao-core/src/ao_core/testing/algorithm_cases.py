"""Weights, and inputs that they are multiplied with, for `AlgorithmSuite`; and what an answer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.calibration.statistics import Statistic, Statistics
from ao_core.compute import ComputeWeight
from ao_core.config import Config
from ao_core.records import Skip, Solved, Target
from ao_core.registry import registry
from ao_core.tensor import QTensor
from ao_core.testing.base import gaussian, same_bits
from ao_core.testing.layout_values import same_parts

__all__ = ["AlgorithmCase", "calibration_rows", "nearly_equal", "same_answers", "statistics_of"]


def calibration_rows(rows: int, columns: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Inputs (rows, columns) as models make them: correlated, of falling magnitude, one column large."""
    mixing = gaussian((columns, columns), seed=1000 + columns) / columns**0.5
    mixing += torch.eye(columns)
    scale = torch.logspace(0, -1.5, columns)
    scale[columns // 3] = 4.0
    rows_TK: Tensor = gaussian((rows, columns), seed=seed) @ mixing * scale
    return rows_TK.to(device)


@dataclass(frozen=True)
class AlgorithmCase:
    """A weight of E matrices (N, K) in some dtype."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.dtype}-{self.device}".replace("torch.", "")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the parameter: (N, K) of a linear layer, (E, N, K) of experts."""
        return self.shape if self.shape[0] > 1 else self.shape[1:]

    def weight(self) -> Tensor:
        """(E, N, K) Gaussian values, 1 / K of variance."""
        values: Tensor = gaussian(self.shape, seed=5, device=self.device) / self.shape[-1] ** 0.5
        return values.to(self.dtype)

    def target(self) -> Target:
        """A layer that owns the weight; its own parameter is on the meta device."""
        with torch.device("meta"):
            module = nn.Module() if self.shape[0] > 1 else nn.Linear(*self.shape[:0:-1])
            module.weight = nn.Parameter(torch.empty(self.stored_shape, dtype=self.dtype))
        return Target("layer.weight", module, "weight")

    def inputs(self, rows: int | None = None) -> list[Tensor]:
        """(rows, K) of each matrix, four for each column by default."""
        count, _, k = self.shape
        return [
            calibration_rows(rows or 4 * k, k, seed=7 + e, device=self.device).to(self.dtype)
            for e in range(count)
        ]

    def applied(self, solved: Solved, weight: Tensor) -> Tensor:
        """What an answer makes of a weight, decoded: (E, N, K) in float64."""
        values = weight if solved.values is None else solved.values
        if not isinstance(values, QTensor) and solved.config is not None:
            values = self.rounded(solved.config, values)
        return _dense(values).reshape(self.shape)

    def rounded(self, config: Config, values: Tensor) -> Tensor:
        """What a configuration makes of dense values of the shape (E, N, K)."""
        stored = values.reshape(self.stored_shape).to(self.dtype)
        new = registry.transform_for(type(config)).apply(stored, config, self.target())
        assert not isinstance(new, Skip), (
            f"Solved.config={config!r} does not apply to {self}: {new.reason}; answer Skip instead"
        )
        return new

    def error(self, change: Tensor, inputs: Sequence[Tensor]) -> float:
        """The squared error of all outputs for a change (E, N, K) of the weight, in float64."""
        pairs = zip(inputs, change.double(), strict=True)
        return sum(float((x.double() @ delta.t()).square().sum()) for x, delta in pairs)


def statistics_of(
    need: Sequence[Statistic], inputs: Sequence[Tensor], pieces: int = 1
) -> tuple[Statistics, ...]:
    """Statistics of the inputs of each matrix, added in so many batches."""
    found = []
    for x in inputs:
        each = Statistics(tuple(need))
        for batch in x.chunk(pieces):
            each = each.add(batch)
        found.append(each)
    return tuple(found)


def _dense(values: Tensor) -> Tensor:
    if isinstance(values, QTensor):
        return values.dequantize(torch.float32).double()
    if isinstance(values, ComputeWeight):
        return _dense(values.memory)
    return values.double()


def same_answers(a: Solved | Skip, b: Solved | Skip) -> bool:
    """Whether two answers are the same, their values bit for bit."""
    if isinstance(a, Skip) or isinstance(b, Skip):
        return a == b
    if (a.config, a.reason, a.damping) != (b.config, b.reason, b.damping):
        return False
    if a.values is None or b.values is None:
        return a.values is b.values
    if isinstance(a.values, QTensor) and isinstance(b.values, QTensor):
        return a.values.spec == b.values.spec and same_parts(a.values, b.values)
    return type(a.values) is type(b.values) and same_bits(a.values, b.values)


def nearly_equal(a: Any, b: Any) -> bool:
    """Whether two configurations are equal but for the last digits of their floats."""
    if isinstance(a, float) and isinstance(b, float):
        return isclose(a, b, rel_tol=1e-4)
    if is_dataclass(a) and type(a) is type(b):
        return all(nearly_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)
