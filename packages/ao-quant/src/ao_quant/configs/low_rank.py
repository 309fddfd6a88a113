"""The configuration of weights with a part of low rank in high precision."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.ext import ConfigError
from ao_quant.configs.scaling import ScalingConfig

__all__ = ["LowRankConfig"]


@dataclass(frozen=True)
class LowRankConfig(ScalingConfig):
    """A part of low rank is taken out of each weight first, and the rest is quantized: SVDQuant.

    The weight becomes B A + R, with B A the nearest matrix of the rank. B and A are kept in bfloat16 and
    multiply activations as they are, and R, whose largest values are smaller, is quantized by what follows.
    All of it is one parameter, in whose format B A is an input step. `SmoothQuantConfig` before it moves
    outliers of activations into weights, from where B A takes them: `[SmoothQuantConfig(), LowRankConfig(),
    base]` is SVDQuant. For weights in few bits, with activations in few bits.

    Where a layer's outputs on the data are not nearer with it, the weight is left whole, and its note says
    so.

    Reference: Li et al. 2024, arXiv:2411.05007.

    Attributes:
        base: what quantizes the weights afterwards. None: the next configuration in the list.
        rank: of B A; memory is `rank` times 2 bytes for each row and each column.
    """

    rank: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank!r}: must be positive, e.g. 32")
