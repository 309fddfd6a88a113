"""Registers ao with transformers; imported when `transformers.quantizers.auto` is."""

from __future__ import annotations

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from ao_core.ext.quantizing import when_quantized
from ao_hf.config import AoConfig
from ao_hf.method import METHOD
from ao_hf.transformers.foreign import take_over
from ao_hf.transformers.models import follow
from ao_hf.transformers.quantizer import AoHfQuantizer

register_quantization_config(METHOD)(AoConfig)
register_quantizer(METHOD)(AoHfQuantizer)
take_over(AUTO_QUANTIZATION_CONFIG_MAPPING)
when_quantized(follow)
