"""Configurations of sparse weights: what `sparsify_`, and `quantize_`, take.

Each configuration also has a short lowercase name, the name of its recipe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import (
    BLOCKSIZE,
    ConfigError,
    GroupSize,
    WeightConfig,
    WeightFormat,
    matrix_spec,
    own_scale_dtype,
    registry,
)

__all__ = [
    "BlockSparseWeightConfig",
    "Float8DynamicActivationFloat8SemiSparseWeightConfig",
    "Int4WeightOnlySemiSparseConfig",
    "Int8DynamicActivationInt8SemiSparseWeightConfig",
    "SemiSparseWeightConfig",
    "block_sparse_weight",
    "float8_dynamic_activation_float8_semi_sparse_weight",
    "int4_weight_only_semi_sparse",
    "int8_dynamic_activation_int8_semi_sparse_weight",
    "semi_sparse_weight",
]

#: the values of `group_size`
_GROUP_SIZES = (32, 64, 128, 256, "row")
#: the format of values as they are, by their dtype; float64 is rounded, as all formats round it
_OWN = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_TOKEN = (1, WHOLE)


def _sparse(spec: Spec) -> WeightFormat:
    """Layouts of ao-sparsity hold matrices that are multiplied."""
    return WeightFormat(spec, matrices_only=True)


@dataclass(frozen=True)
class SemiSparseWeightConfig(WeightConfig):
    """2:4: keeps the two weights of the greatest magnitude of every four along a row, in their dtype.

    A weight that is already 2:4, for example after pruning, keeps its values bit for bit. It takes 0.5625 of
    the memory in 16 bits, 0.53 in 32.
    """

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        numbers = _OWN.get(dtype, "fp32")
        return _sparse(matrix_spec(numbers, "row", "float32", layout="two_four"))


@dataclass(frozen=True)
class Int8DynamicActivationInt8SemiSparseWeightConfig(WeightConfig):
    """2:4 weights in symmetric int8 per row; activations in int8 per token, scaled at each call."""

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        scale, act = own_scale_dtype(dtype), Spec("int8", _TOKEN)
        return _sparse(matrix_spec("int8", "row", scale, act=act, layout="two_four"))


@dataclass(frozen=True)
class Float8DynamicActivationFloat8SemiSparseWeightConfig(WeightConfig):
    """2:4 weights in float8 e4m3 per row; activations in float8 per token, scaled at each call."""

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        act = Spec("f8e4m3", _TOKEN)
        return _sparse(matrix_spec("f8e4m3", "row", "float32", act=act, layout="two_four"))


@dataclass(frozen=True)
class Int4WeightOnlySemiSparseConfig(WeightConfig):
    """2:4 weights in symmetric int4, with one bfloat16 scale per group; activations as they are."""

    #: weights that share a scale, counted with those that were removed: 32, 64, 128, 256 or "row"
    group_size: GroupSize = 128

    def __post_init__(self) -> None:
        size = self.group_size
        if not any(type(size) is type(known) and size == known for known in _GROUP_SIZES):
            choices = ", ".join(map(repr, _GROUP_SIZES))
            raise ConfigError(f"group_size={size!r}: use one of {choices}")

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return _sparse(matrix_spec("int4", self.group_size, "bfloat16", layout="two_four"))


@dataclass(frozen=True)
class BlockSparseWeightConfig(WeightConfig):
    """Keeps the square blocks of a weight that are not all zeros, and stores and multiplies no others.

    A weight that would not get smaller is skipped: prune it first, or let `sparsity` remove blocks.
    """

    #: rows and columns of a block
    blocksize: int = BLOCKSIZE
    #: the share of the blocks of each matrix that goes: those of the least L2 norm, one at least stays. 0:
    #: those that are zeros already
    sparsity: float = 0.0
    #: number format of the values, with one scale per row where it has any; "own": what they are in
    dtype: str = "own"

    def __post_init__(self) -> None:
        if type(self.blocksize) is not int or self.blocksize < 1:
            raise ConfigError(
                f"blocksize={self.blocksize!r}: use a positive integer, e.g. {BLOCKSIZE}"
            )
        if isinstance(self.sparsity, bool) or not 0 <= self.sparsity <= 1:
            raise ConfigError(f"sparsity={self.sparsity!r}: use a share of the blocks, from 0 to 1")

    def check(self) -> None:
        """Raise `UnknownNameError` for a number format that nobody registered."""
        if self.dtype != "own":
            registry.dtypes.get(self.dtype)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        numbers = _OWN.get(dtype, "fp32") if self.dtype == "own" else self.dtype
        options: dict[str, float] = {"blocksize": self.blocksize}
        if self.sparsity:
            options["sparsity"] = float(self.sparsity)
        spec = matrix_spec(
            numbers,
            "row",
            own_scale_dtype(dtype),
            layout="bsr",
            options=tuple(sorted(options.items())),
        )
        return _sparse(spec)


semi_sparse_weight = SemiSparseWeightConfig
int8_dynamic_activation_int8_semi_sparse_weight = Int8DynamicActivationInt8SemiSparseWeightConfig
float8_dynamic_activation_float8_semi_sparse_weight = (
    Float8DynamicActivationFloat8SemiSparseWeightConfig
)
int4_weight_only_semi_sparse = Int4WeightOnlySemiSparseConfig
block_sparse_weight = BlockSparseWeightConfig
