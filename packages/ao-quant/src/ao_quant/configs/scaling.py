"""Configurations that move scales between weights, or from activations into weights, before quantization."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config, FqnToConfig, resolve_config
from ao_core.ext import AoError, ConfigError, WeightConfig, shown
from ao_quant.configs.algorithms import BaseConfig

__all__ = ["AWQConfig", "ClipConfig", "EqualizeConfig", "ScalingConfig", "SmoothQuantConfig"]

#: the word for `SmoothQuantConfig.alpha`
SEARCH = "search"


@dataclass(frozen=True)
class ScalingConfig(Config):
    """Base of configurations that find factors of input channels.

    The factors move into what makes the channels (a norm, `v_proj` before `o_proj`, `up_proj` before
    `down_proj`), so they cost nothing at run time; where nothing can take them they are an input step of the
    weight. All weights that read one input share its factors.

    Attributes:
        base: what quantizes the weights afterwards. None: the next configuration in the list.
    """

    base: Config | None = None

    def __post_init__(self) -> None:
        if self.base is None:
            return
        try:
            base = resolve_config(self.base)
        except AoError as error:
            raise ConfigError(f"base={shown(self.base)}: {error}") from error
        if isinstance(base, (FqnToConfig, ScalingConfig)):
            raise ConfigError(
                f"base={shown(self.base)}: use one configuration that quantizes weights, and FqnToConfig "
                f"around {type(self).__name__}"
            )
        object.__setattr__(self, "base", base)


@dataclass(frozen=True)
class AWQConfig(ScalingConfig):
    """AWQ: input channels of large activations get finer steps.

    Columns of the weights are multiplied by s = mean|x|ʳ and what makes x is divided by it. The exponent r is
    searched for the least squared error of the outputs, Σ tr(Δ H Δᵀ) over all weights that read x, on a grid
    that has r = 0, the weights as they are.

    Reference: Lin et al. 2023, arXiv:2306.00978.

    Attributes:
        base: as of all; its format is the one that the search rounds to.
        steps: how many exponents above 0, up to 1, are tried.
        clip: whether ranges are searched afterwards, as `ClipConfig` does, where `base` is a format.
    """

    steps: int = 20
    clip: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps!r}: must be positive, e.g. 20")

    def then(self) -> Config | None:
        """What quantizes the weights once the factors are in them."""
        return (
            ClipConfig(self.base)
            if self.clip and isinstance(self.base, WeightConfig)
            else self.base
        )


@dataclass(frozen=True)
class SmoothQuantConfig(ScalingConfig):
    """SmoothQuant: part of the range of activations is moved into the weights, where both are quantized.

    What makes channel j is divided by s = max|x_j|ᵃ / max|w_j|¹⁻ᵃ, and the columns of all weights that read
    it are multiplied by s.

    Reference: Xiao et al. 2022, arXiv:2211.10438.

    Attributes:
        base: as of all; one that quantizes activations, such as `Int8DynamicActivationInt8WeightConfig()`.
        alpha: the share a of the range that the weights take, from 0 to 1; or "search". Then, for each input
            that a norm makes, it is what of 0, 0.1, … 1 and no factors has the least squared error of the
            outputs, on rows of the data. Between two weights, and where no format is known, it is 0.5: there
            the error of one layer does not tell what a block makes of it.
    """

    alpha: float | str = SEARCH

    def __post_init__(self) -> None:
        super().__post_init__()
        is_share = isinstance(self.alpha, (int, float)) and 0 <= self.alpha <= 1
        if self.alpha != SEARCH and not is_share:
            raise ConfigError(
                f"alpha={self.alpha!r}: use a share from 0 to 1, such as 0.5, or {SEARCH!r}"
            )


@dataclass(frozen=True)
class EqualizeConfig(Config):
    """Cross-layer equalization: channels between two weights get the same range on both sides.

    With r the largest magnitude of a channel in the weights that make it, and R in those that read it, the
    first are divided and the second multiplied by √(r / R), again and again until nothing changes. Only where
    scales pass between weights: through ReLU, the gated product of an MLP, attention. Data only traces the
    model and proves that its outputs stay.

    Reference: Nagel et al. 2019, arXiv:1906.04721.

    Attributes:
        rounds: times that all pairs are equalized, at most.
    """

    rounds: int = 40

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds!r}: must be positive, e.g. 40")


@dataclass(frozen=True)
class ClipConfig(BaseConfig):
    """Ranges that clip: the largest weights of a group are cut off where that lets the others be finer.

    The range of each group is 1, 0.95, … times its own: the factor with the least error of what the group
    adds to the outputs, δ H δᵀ with H of the group's columns. The last part of AWQ.

    Attributes:
        least: the smallest factor that is tried.
    """

    least: float = 0.55

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= 1:
            raise ConfigError(f"least={self.least!r}: use a share above 0, up to 1, such as 0.55")
