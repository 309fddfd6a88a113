"""The configurations that are compared: every recipe, and every format by group size and scales."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config, FqnToConfig, WeightOnlyConfig
from ao_core.ext import registry

#: weights that share a scale
GROUPS: tuple[int | str, ...] = (32, 64, 128, "row")
#: kinds of formats whose scales are worth a search
_AFFINE = ("int", "lut")


@dataclass(frozen=True)
class Case:
    """A configuration, and where its figures belong."""

    #: "recipe" or "format"
    table: str
    name: str
    config: Config
    #: of formats: weights that share a scale, and how it is chosen
    group: int | str = ""
    scales: str = ""

    @property
    def asked(self) -> Config:
        """The configuration as it is measured: a format is that of all weights, the head's too."""
        if self.table == "recipe":
            return self.config
        return FqnToConfig({"lm_head": self.config, "*": self.config})


def recipes() -> list[Case]:
    """Every recipe of the installed packages."""
    return [Case("recipe", name, recipe.config) for name, recipe in registry.recipes.items()]


def formats() -> list[Case]:
    """Every registered number format, with every group size and way to choose scales."""
    found = []
    for dtype in sorted(registry.dtypes.values(), key=lambda dtype: (-dtype.bits, dtype.name)):
        if not dtype.has_scale:
            continue  # for layouts that store fewer values than there are
        unsigned = dtype.kind == "int" and dtype.min == 0
        for scales in registry.scale_methods.names():
            if scales != "absmax" and dtype.kind not in _AFFINE:
                continue  # there is nothing to choose, or little to gain
            for group in GROUPS:
                zero_point = "int" if unsigned else "none"
                config = WeightOnlyConfig(
                    dtype.name, group, "bfloat16", zero_point, scale_method=scales
                )
                found.append(Case("format", dtype.name, config, group, scales))
    return found
