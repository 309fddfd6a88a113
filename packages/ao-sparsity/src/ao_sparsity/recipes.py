"""Named, ready configurations; `block_sparse_weight` is one under the name of its transform."""

from __future__ import annotations

from ao_core import Recipe
from ao_sparsity import configs as c

__all__ = ["RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "semi_sparse_weight",
        c.SemiSparseWeightConfig(),
        "2:4 weights in their own dtype, 0.5625 of the memory in 16 bits",
    ),
    Recipe(
        "int8_dynamic_activation_int8_semi_sparse_weight",
        c.Int8DynamicActivationInt8SemiSparseWeightConfig(),
        "2:4 int8 weights per row and int8 activations per token",
    ),
    Recipe(
        "float8_dynamic_activation_float8_semi_sparse_weight",
        c.Float8DynamicActivationFloat8SemiSparseWeightConfig(),
        "2:4 float8 e4m3 weights per row and activations per token",
    ),
    Recipe(
        "int4_weight_only_semi_sparse",
        c.Int4WeightOnlySemiSparseConfig(),
        "2:4 int4 weights in groups of 128, 0.391 bytes per weight",
    ),
)
