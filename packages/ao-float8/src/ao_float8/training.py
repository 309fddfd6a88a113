"""Configurations of training in other formats than float8."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config
from ao_core.ext import ConfigError

__all__ = [
    "BitNetTrainingConfig",
    "Int8MixedPrecisionTrainingConfig",
    "Int8WeightOnlyTrainingConfig",
    "MXTrainingConfig",
    "NVFP4TrainingConfig",
]

#: elements of MX blocks that training is emulated in
_ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


@dataclass(frozen=True)
class Int8MixedPrecisionTrainingConfig(Config):
    """Matmuls of linear layers in int8, both operands with one scale per row; weights stay as they are.

    Each matmul can stay in high precision. The gradient of the weight suffers most, because it is summed over
    all tokens.
    """

    #: output = input @ weight.T
    output: bool = True
    #: gradient of the input = gradient @ weight
    grad_input: bool = True
    #: gradient of the weight = gradient.T @ input
    grad_weight: bool = True


@dataclass(frozen=True)
class Int8WeightOnlyTrainingConfig(Config):
    """Weights that *are* int8, one float32 scale per row, and are trained: half the bytes of bfloat16.

    There is no copy in high precision. The optimizer's update is rounded stochastically: the nearer code is
    the likelier one, so updates below half a step are not lost on average. Wrap the optimizer's step in
    `stochastic_rounding(generator)`.
    """


@dataclass(frozen=True)
class BitNetTrainingConfig(Config):
    """Train for BitNet b1.58: ternary weights by their mean magnitude, int8 activations per token.

    Gradients pass the rounding straight through (Ma et al. 2024, arXiv:2402.17764, section 2). The
    trained weights go to `int8_dynamic_activation_ternary_weight` of ao-quant, or to `bitnet_weight_only`.
    """


@dataclass(frozen=True)
class MXTrainingConfig(Config):
    """All three matmuls in an MX format, blocks of 32 elements with a power of two; emulated."""

    #: format of elements: "e2m1" (MXFP4), "e2m3" or "e3m2" (MXFP6), "e4m3" or "e5m2" (MXFP8)
    dtype: str = "e2m1"
    #: format of elements of gradients
    grad_dtype: str = "e2m1"

    def __post_init__(self) -> None:
        for name in ("dtype", "grad_dtype"):
            if getattr(self, name) not in _ELEMENTS:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} in MXTrainingConfig: use one of "
                    f"{', '.join(_ELEMENTS)}"
                )


@dataclass(frozen=True)
class NVFP4TrainingConfig(Config):
    """All three matmuls in NVFP4, emulated: 4-bit floats in blocks of 16 with float8 scales."""

    #: whether both matmuls of the backward pass are too; else they are in high precision
    backward: bool = True
