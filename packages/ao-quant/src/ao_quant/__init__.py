"""Weight-only and dynamic quantization recipes for PyTorch models, built on ao-core."""

from ao_quant.__about__ import __version__

__all__ = ["__version__"]
