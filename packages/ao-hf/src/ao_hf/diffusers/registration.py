"""Registers ao with diffusers; imported when `diffusers.quantizers.auto` is."""

from __future__ import annotations

from typing import Any

from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ao_core.ext.quantizing import when_quantized
from ao_hf.config import AoConfig
from ao_hf.diffusers.models import follow
from ao_hf.diffusers.quantizer import AoDiffusersQuantizer
from ao_hf.method import METHOD

# diffusers has no function for that: its own methods stand in these tables too
_configs: dict[str, Any] = AUTO_QUANTIZATION_CONFIG_MAPPING
_quantizers: dict[str, Any] = AUTO_QUANTIZER_MAPPING
_configs[METHOD] = AoConfig
_quantizers[METHOD] = AoDiffusersQuantizer
when_quantized(follow)
