"""The transforms of ao-sparsity: from a dense parameter to one in a sparse layout."""

from __future__ import annotations

from torch import Tensor

from ao_core import QTensor, Skip, Target, Transform
from ao_core.ext import apply_weight_config
from ao_sparsity import configs as c

__all__ = ["TRANSFORMS"]


def _apply_blocks(
    dense: Tensor, config: c.BlockSparseWeightConfig, target: Target
) -> Tensor | Skip:
    """The same, unless blocks would only add to what the weight takes."""
    new = apply_weight_config(dense, config, target)
    if not isinstance(new, QTensor) or dense.is_meta:
        return new
    before = dense.numel() * dense.element_size()
    if new.stored_bytes < before:
        return new
    return Skip(
        f"in blocks of {config.blocksize} × {config.blocksize} it would take {new.stored_bytes} bytes, and "
        f"dense it takes {before}: {new.sparsity or 0:.0%} of its blocks are zeros. Prune it by blocks "
        "first, use smaller ones, or set sparsity"
    )


TRANSFORMS: tuple[Transform, ...] = (
    Transform(c.SemiSparseWeightConfig, "semi_sparse_weight", 1, apply_weight_config),
    Transform(
        c.Int8DynamicActivationInt8SemiSparseWeightConfig,
        "int8_dynamic_activation_int8_semi_sparse_weight",
        1,
        apply_weight_config,
    ),
    Transform(
        c.Float8DynamicActivationFloat8SemiSparseWeightConfig,
        "float8_dynamic_activation_float8_semi_sparse_weight",
        1,
        apply_weight_config,
    ),
    Transform(
        c.Int4WeightOnlySemiSparseConfig, "int4_weight_only_semi_sparse", 1, apply_weight_config
    ),
    Transform(
        c.BlockSparseWeightConfig,
        "block_sparse_weight",
        1,
        _apply_blocks,
        example=c.BlockSparseWeightConfig(blocksize=8, sparsity=0.5),
    ),
)
