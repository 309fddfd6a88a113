"""Quantized models and pipelines in diffusers: `AoConfig` for `from_pretrained`, and what saves them."""

from __future__ import annotations

from ao_core.ext import MissingExtraError

try:  # first: when it is there, what registers ao is imported, which needs the modules below whole
    import diffusers.quantizers.auto  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "diffusers":
        raise
    raise MissingExtraError("diffusers", "ao-hf[diffusers]", "ao_hf.diffusers") from error

from ao_hf.config import AoConfig
from ao_hf.diffusers.models import attach
from ao_hf.diffusers.quantizer import AoDiffusersQuantizer
from ao_hf.memory import memory_footprint
from ao_hf.pipelines import quantize_pipeline

__all__ = [
    "AoConfig",
    "AoDiffusersQuantizer",
    "attach",
    "memory_footprint",
    "quantize_pipeline",
]
