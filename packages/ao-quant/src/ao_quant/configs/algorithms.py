"""Configurations of calibrated algorithms: a format, and how its codes or scales are found."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config, FqnToConfig, resolve_config
from ao_core.ext import AoError, ConfigError, WeightConfig, shown
from ao_quant.configs.base import one_of
from ao_quant.configs.ints import Int4WeightOnlyConfig

__all__ = ["ORDERS", "BaseConfig", "GPTQConfig", "ImatrixConfig", "QronosConfig"]

#: the values of `GPTQConfig.order`
ORDERS = ("activations", "groups", "natural")
_BASE = Int4WeightOnlyConfig(128)


@dataclass(frozen=True)
class BaseConfig(Config):
    """Base of configurations that find codes or scales of another one's format.

    Attributes:
        base: the configuration, or the name of its recipe, by which weights are quantized.
    """

    base: Config = _BASE

    def __post_init__(self) -> None:
        try:
            base = resolve_config(self.base)
        except AoError as error:
            raise ConfigError(f"base={shown(self.base)}: {error}") from error
        if isinstance(base, FqnToConfig):
            raise ConfigError(
                f"base={shown(self.base)}: use one configuration, and FqnToConfig around "
                f"{type(self).__name__}"
            )
        if not isinstance(base, WeightConfig):
            raise ConfigError(
                f"base={shown(self.base)}: {type(self).__name__} needs a format of weights, such as "
                "Int4WeightOnlyConfig(128)"
            )
        object.__setattr__(self, "base", base)

    @property
    def weights(self) -> WeightConfig:
        """The base, of which it is known that it has a format of weights."""
        assert isinstance(self.base, WeightConfig)
        return self.base

    def check(self) -> None:
        """Raise what the base raises."""
        self.base.check()


@dataclass(frozen=True)
class GPTQConfig(BaseConfig):
    """GPTQ: columns are rounded one after the other, and those that follow make up for the errors.

    The squared error of a layer's outputs on the data is a quadratic form in the change of its weights, with
    H = Σ x xᵀ. Scales and zero points are those of the unchanged weight ("static groups"), so weights can
    be rounded in any order, and the result runs like one of rounding to nearest.

    Reference: Frantar, Ashkboos, Hoefler and Alistarh 2022, arXiv:2210.17323.

    Attributes:
        damping: share of the mean of H's diagonal that is added to it. Where H is singular all the same it is
            ten times as much, up to 1; the report has what was used.
        order: in which columns are rounded: "activations", by falling Σ x²; "groups", so inside the groups
            and among them, each group at once; or "natural".
        importance: whether scales are searched for the least error weighted by Σ x² of the columns, as
            `ImatrixConfig` does; otherwise they are those of the base.
    """

    damping: float = 0.01
    order: str = "activations"
    importance: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.damping <= 1:
            raise ConfigError(
                f"damping={self.damping!r}: use a share above 0, up to 1, such as 0.01"
            )
        one_of(self, "order", ORDERS)


@dataclass(frozen=True)
class QronosConfig(GPTQConfig):
    """Qronos: weights are first fitted to the inputs that quantized layers make, and then rounded by GPTQ.

    GPTQ keeps the outputs of a layer for the inputs x that the quantized weights before it make. But outputs
    should be W x̃, with the x̃ of the model as it was. With G = Σ x̃ xᵀ and H = Σ x xᵀ, what comes nearest to
    them before it is rounded is W G H⁻¹, of which the damped form W + W (G - H) (H + λ)⁻¹ is taken. A model
    that nothing has changed yet has G = H, and then it is GPTQ. Data is run twice, so it takes up to twice as
    long.

    The paper rounds the first column by what the others were before they were fitted; here it is like all.

    Reference: Zhang et al. 2025, arXiv:2505.11695.

    Attributes:
        damping: as of GPTQ; of the fit, too, which moves less with more of it.
        order: as of GPTQ.
        importance: as of GPTQ.
    """


@dataclass(frozen=True)
class ImatrixConfig(BaseConfig):
    """Scales of least squared error, where the error of a column counts by Σ x² of its inputs.

    The data-aware counterpart of `scale_method="mse"`: the diagonal of GPTQ's H, the "importance matrix" of
    llama.cpp. Codes are rounded to nearest.
    """
