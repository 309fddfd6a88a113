"""The configurations that are compared: every recipe, and every format by group size and method."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace

from torch import nn

from ao_core import Config, QTensor, Report, WeightOnlyConfig, quantize_
from ao_core.errors import AoError
from ao_core.registry import registry

#: weights that share a scale
GROUPS: tuple[int | str, ...] = (32, 64, 128, "row")


@dataclass(frozen=True)
class Case:
    """A configuration, and where its figures belong."""

    #: "recipe" or "format"
    table: str
    name: str
    config: Config
    #: of formats
    group: int | str = ""
    scales: str = ""


@dataclass(frozen=True)
class Variant:
    """A quantized model, and the report on it."""

    model: nn.Module
    report: Report


def scale_methods() -> list[str]:
    """Names of the ways to choose scales, the plain one first."""
    if "scales" not in {field.name for field in fields(WeightOnlyConfig)}:
        return ["absmax"]
    return registry.scales.names()


def recipes() -> list[Case]:
    """Every recipe of the installed packages."""
    return [Case("recipe", name, recipe.config) for name, recipe in registry.recipes.items()]


def formats() -> list[Case]:
    """Every registered number format with every group size and way to choose scales."""
    found = []
    for dtype in sorted(registry.dtypes.values(), key=lambda dtype: (-dtype.bits, dtype.name)):
        unsigned = dtype.kind == "int" and dtype.min == 0
        for scales in scale_methods():
            for group in GROUPS:
                config = WeightOnlyConfig(
                    dtype.name, group, "bfloat16", "int" if unsigned else "none"
                )
                if scales != "absmax":
                    config = replace(config, scales=scales)
                found.append(Case("format", dtype.name, config, group, scales))
    return found


def share(model: nn.Module) -> nn.Module:
    """A copy that shares all parameters with the original, until one of the two replaces some."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters()})


def quantized(model: nn.Module, config: Config) -> Variant | str:
    """The variant that a configuration makes of the model, or why it is not one to compare."""
    made = share(model)
    try:
        report = quantize_(made, config)
    except AoError as error:
        return f"does not apply here: {error}"
    if not any(isinstance(parameter, QTensor) for parameter in made.parameters()):
        return "a recipe for training: its weights stay in high precision"
    return Variant(made, report)
