"""The configuration of AutoRound."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.ext import ConfigError
from ao_quant.configs.algorithms import BaseConfig
from ao_quant.configs.base import one_of

__all__ = ["STARTS", "AutoRoundConfig"]

#: the values of `AutoRoundConfig.start`
STARTS = ("gptq", "importance", "nearest")


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
        batches: of the data, so many are used for a step, and of each process where several have data.
            Gradients of few tokens are noisy, and those of many slow: 512 to 4096 tokens are sensible.
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
