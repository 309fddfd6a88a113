"""Quantized models in transformers, PEFT, diffusers and accelerate."""

from ao_hf.__about__ import __version__

__all__ = ["__version__"]
