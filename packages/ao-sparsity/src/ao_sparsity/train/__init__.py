"""Sparse training: linear layers that learn to be 2:4 or block-sparse, swapped in by name and back."""

from __future__ import annotations

from ao_sparsity.train.linear import SemiSparseActivationLinear, SemiSparseLinear, SparseLinear
from ao_sparsity.train.supermask import SupermaskLinear, set_sparsity
from ao_sparsity.train.swap import (
    squash_masks,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)
from ao_sparsity.train.tiles import tile_mask

__all__ = [
    "SemiSparseActivationLinear",
    "SemiSparseLinear",
    "SparseLinear",
    "SupermaskLinear",
    "set_sparsity",
    "squash_masks",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
    "tile_mask",
]
