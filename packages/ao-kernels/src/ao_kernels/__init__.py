"""Compiled kernels for ao: low-bit linear layers on the CPU at the speed of memory."""

from ao_kernels.__about__ import __version__

__all__ = ["__version__"]
