"""Configurations that correct what quantization leaves."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config, resolve_config
from ao_core.ext import AoError, ConfigError, WeightConfig, shown
from ao_quant.configs.algorithms import BaseConfig
from ao_quant.configs.ints import Int4WeightOnlyConfig

__all__ = ["BiasCorrectionConfig"]

_BASE = Int4WeightOnlyConfig(128)


@dataclass(frozen=True)
class BiasCorrectionConfig(Config):
    """What a configuration does, and then the mean error of each layer's outputs is taken off by its bias.

    (W - Ŵ) E[x] is added to the bias, so over the calibration data the mean output is that of the original
    weight; inputs are those that the quantized layers before make. A layer without a bias gets none, which
    its note says: a model that is built anew from its configuration would have no place for it.

    Reference: Nagel et al. 2019, arXiv:1906.04721.

    Attributes:
        base: a format of weights, or an algorithm that solves weight by weight, as `GPTQConfig`; or the name
            of a recipe.
    """

    base: Config = _BASE

    def __post_init__(self) -> None:
        try:
            base = resolve_config(self.base)
        except AoError as error:
            raise ConfigError(f"base={shown(self.base)}: {error}") from error
        if not isinstance(base, (WeightConfig, BaseConfig)):
            raise ConfigError(
                f"base={shown(self.base)}: BiasCorrectionConfig needs a format of weights or an algorithm, "
                "such as GPTQConfig(Int4WeightOnlyConfig(128))"
            )
        object.__setattr__(self, "base", base)

    def check(self) -> None:
        """Raise what the base raises."""
        self.base.check()
