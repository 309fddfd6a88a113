"""2:4, block and unstructured sparsity: pruning, sparse training, smaller layouts; built on ao-core."""

from ao_sparsity.__about__ import __version__
from ao_sparsity.train import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    SparseLinear,
    SupermaskLinear,
    set_sparsity,
    squash_masks,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
    tile_mask,
)

__all__ = [
    "SemiSparseActivationLinear",
    "SemiSparseLinear",
    "SparseLinear",
    "SupermaskLinear",
    "__version__",
    "set_sparsity",
    "squash_masks",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
    "tile_mask",
]
