"""2:4, block and unstructured sparsity: pruning, sparse training, smaller layouts; built on ao-core."""

from ao_sparsity.__about__ import __version__

__all__ = ["__version__"]
