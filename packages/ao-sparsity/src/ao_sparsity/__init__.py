"""2:4, block and unstructured sparsity: pruning, sparse training, smaller layouts; built on ao-core."""

from __future__ import annotations

from ao_sparsity.__about__ import __version__
from ao_sparsity.configs import (
    BlockSparseWeightConfig,
    Float8DynamicActivationFloat8SemiSparseWeightConfig,
    Int4WeightOnlySemiSparseConfig,
    Int8DynamicActivationInt8SemiSparseWeightConfig,
    SemiSparseWeightConfig,
    block_sparse_weight,
    float8_dynamic_activation_float8_semi_sparse_weight,
    int4_weight_only_semi_sparse,
    int8_dynamic_activation_int8_semi_sparse_weight,
    semi_sparse_weight,
)
from ao_sparsity.sparsify import sparsify_

__all__ = [
    "BlockSparseWeightConfig",
    "Float8DynamicActivationFloat8SemiSparseWeightConfig",
    "Int4WeightOnlySemiSparseConfig",
    "Int8DynamicActivationInt8SemiSparseWeightConfig",
    "SemiSparseWeightConfig",
    "__version__",
    "block_sparse_weight",
    "float8_dynamic_activation_float8_semi_sparse_weight",
    "int4_weight_only_semi_sparse",
    "int8_dynamic_activation_int8_semi_sparse_weight",
    "semi_sparse_weight",
    "sparsify_",
]
