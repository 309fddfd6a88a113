"""Configurations of LUTs and codebooks: values that are listed, not computed from bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import GroupSize, WeightConfig, WeightFormat, matrix_spec
from ao_quant.configs.base import YES_NO, one_of

__all__ = ["CodebookWeightOnlyConfig", "NF4WeightOnlyConfig"]


@dataclass(frozen=True)
class NF4WeightOnlyConfig(WeightConfig):
    """Weights in the 16 values of NF4, quantiles of the normal distribution, in groups of 64.

    The format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314). Scales are float32: 4.5 bits per weight in
    total. With `double_quant` they are float8 e4m3 with one global float32 scale: 4.125 bits. (The paper
    subtracts the mean of each 256 scales and gives them one float32 scale: 4.127 bits.)
    """

    #: True: quantize the scales too
    double_quant: bool = True

    def __post_init__(self) -> None:
        one_of(self, "double_quant", YES_NO)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        # float8 keeps the scales of small rows, which steps of an integer would round to 0; with that
        # range one scale of scales is enough, so that rows can be cut and joined freely
        scale = Spec("f8e4m3", (WHOLE, WHOLE)) if self.double_quant else "float32"
        return WeightFormat(matrix_spec("nf4", 64, scale))


@dataclass(frozen=True)
class CodebookWeightOnlyConfig(WeightConfig):
    """Weights in 2**bits values that k-means learns from the weights, without data.

    The codebook of a row or a group is bfloat16, so 16 values add 1 bit per weight to a group of 256. The
    codebook of a whole tensor is float32.
    """

    #: 1 to 8
    bits: int = 4
    #: weights that share their values: 128, 256, 512 or 1024, "row" or "tensor" (each expert's by itself)
    group_size: GroupSize = "row"

    def __post_init__(self) -> None:
        one_of(self, "bits", tuple(range(1, 9)))
        one_of(self, "group_size", (128, 256, 512, 1024, "row", "tensor"))

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        values = "float32" if self.group_size == "tensor" else "bfloat16"
        return WeightFormat(matrix_spec(f"codebook{self.bits}", self.group_size, values))
