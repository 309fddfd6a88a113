"""Quantized models in transformers: `AoConfig` for `from_pretrained`, and what saves and loads them."""

from __future__ import annotations

# first: when it is there, what registers ao is imported, which needs the modules below whole
import transformers.quantizers.auto  # noqa: F401

from ao_hf.config import AoConfig
from ao_hf.memory import memory_footprint
from ao_hf.transformers.models import attach
from ao_hf.transformers.quantizer import AoHfQuantizer

__all__ = ["AoConfig", "AoHfQuantizer", "attach", "memory_footprint"]
