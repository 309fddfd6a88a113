"""Formats, methods, and which of them are measured together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ao_core import Config
from ao_quant import (
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    ImatrixConfig,
    Int4DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    RotateConfig,
    SmoothQuantConfig,
    TrellisWeightOnlyConfig,
    UIntxWeightOnlyConfig,
)

__all__ = ["FORMATS", "METHODS", "NEAREST", "Cell", "cells_of"]

#: what others are compared with
NEAREST = "rounding to nearest"
FORMATS: dict[str, Config] = {
    "int4 g128": Int4WeightOnlyConfig(128),
    "int4 g32": Int4WeightOnlyConfig(32),
    "int3 g64": UIntxWeightOnlyConfig(3, 64),
    "int2 g64": UIntxWeightOnlyConfig(2, 64),
    "trellis 4": TrellisWeightOnlyConfig(4),
    "trellis 3": TrellisWeightOnlyConfig(3),
    "trellis 2": TrellisWeightOnlyConfig(2),
    "int8": Int8WeightOnlyConfig(),
    "W8A8": Int8DynamicActivationInt8WeightConfig(),
    "W4A4 int4": Int4DynamicActivationInt4WeightConfig(128),
    "W4A4 mxfp4": MXDynamicActivationMXWeightConfig("e2m1", "e2m1", "even"),
}
METHODS: dict[str, Callable[[Config], list[Config]]] = {
    NEAREST: lambda base: [base],
    "importance": lambda base: [ImatrixConfig(base)],
    "AWQ": lambda base: [AWQConfig(base)],
    "SmoothQuant": lambda base: [SmoothQuantConfig(base)],
    "SmoothQuant, GPTQ": lambda base: [SmoothQuantConfig(), GPTQConfig(base)],
    "GPTQ": lambda base: [GPTQConfig(base)],
    "AutoRound": lambda base: [AutoRoundConfig(base)],
    "rotation, rounding": lambda base: [RotateConfig(), base],
    "rotation, GPTQ": lambda base: [RotateConfig(), GPTQConfig(base)],
    "block rotation, GPTQ": lambda base: [RotateConfig(block=32), GPTQConfig(base)],
}


class Cell(NamedTuple):
    """One figure of the table."""

    format: str
    method: str
    #: of the weights, where they are drawn, and of the data that calibrates
    seed: int


def cells_of(table: Iterable[tuple[str, Iterable[str]]], seeds: int) -> list[Cell]:
    """The cells of formats and their methods, all of one seed before the next."""
    pairs = [(name, method) for name, methods in table for method in methods]
    return [Cell(name, method, seed) for seed in range(seeds) for name, method in pairs]
