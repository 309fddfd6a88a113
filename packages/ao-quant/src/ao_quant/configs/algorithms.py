"""Configurations of calibrated algorithms: a format, and how its codes or scales are found."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config, FqnToConfig, resolve_config
from ao_core.ext import AoError, ConfigError, WeightConfig, shown
from ao_quant.configs.base import one_of
from ao_quant.configs.ints import Int4WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig

__all__ = [
    "ORDERS", "STARTS", "AWQConfig", "AutoRoundConfig", "BaseConfig",
    "BiasCorrectionConfig", "GPTQConfig", "ImatrixConfig", "SmoothQuantConfig",
]  # fmt: skip

#: the values of `GPTQConfig.order`
ORDERS = ("activations", "groups", "natural")
#: the values of `AutoRoundConfig.start`
STARTS = ("gptq", "importance", "nearest")
_BASE = Int4WeightOnlyConfig(128)
_BOTH = Int8DynamicActivationInt8WeightConfig()


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
class ImatrixConfig(BaseConfig):
    """Scales of least squared error, where the error of a column counts by Σ x² of its inputs.

    The data-aware counterpart of `scale_method="mse"`: the diagonal of GPTQ's H, the "importance matrix" of
    llama.cpp. Codes are rounded to nearest.
    """


@dataclass(frozen=True)
class AWQConfig(BaseConfig):
    """AWQ: input channels of large activations get finer steps.

    Columns of the weight are multiplied by s = mean|x|ʳ, and activations are divided by it before the matmul,
    by an input step. The exponent r is searched for the least squared error of the outputs, tr(Δ H Δᵀ), on a
    grid that has r = 0, rounding to nearest as it is.

    Reference: Lin et al. 2023, arXiv:2306.00978. There s is folded into the layer before where there is one.

    Attributes:
        steps: how many exponents above 0, up to 1, are tried.
    """

    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps!r}: must be positive, e.g. 20")


@dataclass(frozen=True)
class AutoRoundConfig(BaseConfig):
    """AutoRound: rounding up or down, and the ranges of blocks, are learned by the outputs of whole blocks.

    Each weight has an offset v from -1/2 to 1/2 that is added before it is rounded, and each block of the
    format two factors of its range. All of them follow the signs of gradients of the mean squared error
    between what a block of the model (such as a layer of a transformer) returns and what it returned in the
    original model. Inputs are those that the quantized blocks before it make. The best of the roundings that
    were measured over all data is kept, so the loss is not above that of the start. For integers of any
    number of bits; with `ranges=False` the problem is that of AdaRound (Nagel et al. 2020,
    arXiv:2004.10568): to round each weight up or down on a grid that stays.

    Weights in no block, and models whose blocks cannot be run one by one, are learned layer by layer, by the
    squared error of the layer's outputs tr(Δ H Δᵀ).

    Reference: Cheng et al. 2023, arXiv:2309.05516.

    Attributes:
        iterations: the number of steps; 0 is the start.
        batches: of the data, so many are used for a step. Gradients of few tokens are noisy, and those of
            many slow: 512 to 4096 tokens are sensible.
        rate: the size of the first step, which falls linearly to 0; None: 1 / iterations, so that an offset
            can go from 0 to 1/2 in all.
        momentum: the share of earlier gradients in the mean whose signs are followed, from 0 (the paper's) to
            below 1.
        ranges: whether factors of ranges are learned, too. Scales that are quantized themselves, or powers of
            two, stay in any case.
        start: what is improved: "gptq", the codes that `GPTQConfig` finds, where an offset is added to what a
            weight was when its turn came; "importance", rounding to nearest with the scales of
            `ImatrixConfig`; or "nearest", with those of the base.
        bfloat16: whether steps compute blocks in bfloat16 (autocast). Losses that decide what is kept are
            measured in the dtype of the model.
        seed: of the order in which batches are used.
    """

    iterations: int = 200
    batches: int = 1
    rate: float | None = None
    momentum: float = 0.9
    ranges: bool = True
    start: str = "gptq"
    bfloat16: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 0:
            raise ConfigError(f"iterations={self.iterations!r}: use 0 or more, such as 200")
        one_of(self, "start", STARTS)
        if self.batches < 1:
            raise ConfigError(f"batches={self.batches!r}: must be positive, e.g. 1")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate={self.rate!r}: must be positive, e.g. 0.005, or None")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum!r}: use a share below 1, such as 0.9")

    @property
    def first_rate(self) -> float:
        """The size of the first step."""
        return 1 / max(self.iterations, 1) if self.rate is None else self.rate


@dataclass(frozen=True)
class SmoothQuantConfig(BaseConfig):
    """SmoothQuant: part of the range of activations is moved into the weight, where both are quantized.

    Activations of channel j are divided by s = max|x_j|ᵃ / max|w_j|¹⁻ᵃ before they are quantized, by an input
    step, and the columns of the weight are multiplied by it.

    Reference: Xiao et al. 2022, arXiv:2211.10438. There s is folded into the norm before, where there is one.

    Attributes:
        base: as of the others; one that quantizes activations.
        alpha: the share a of the range that the weight takes, from 0 to 1.
    """

    base: Config = _BOTH
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha!r}: use a share from 0 to 1, such as 0.5")


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
