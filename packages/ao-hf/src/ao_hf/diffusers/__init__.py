"""Quantized models and pipelines in diffusers: `AoConfig` for `from_pretrained`, and what saves them."""

from __future__ import annotations

from importlib.util import find_spec

from ao_core.ext import MissingExtraError

if find_spec("diffusers") is None:
    raise MissingExtraError("diffusers", "ao-hf[diffusers]", "ao_hf.diffusers")

# first: when it is there, what registers ao is imported, which needs the modules below whole
import diffusers.quantizers.auto  # noqa: F401

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
