"""Quantized keys and values for `model.generate`: `AoCache`, and the attention "ao_kv" that reads it.

See [Quantized KV caches in transformers](../hf/kv-cache.md).
"""

from __future__ import annotations

from ao_core.ext import MissingExtraError

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("transformers", "ao-hf[transformers]", "AoCache") from error

from ao_hf.cache import registration  # noqa: F401
from ao_hf.cache.caches import AoCache, AoEncoderDecoderCache
from ao_hf.cache.keys import WiderKeysWarning
from ao_hf.cache.planning import CACHE_CANDIDATES, plan_cache
from ao_hf.cache.plans import CachePlan, LayerChoice, LayerOption, UniformCache
from ao_hf.cache.report import CacheReport, LayerMemory

__all__ = [
    "CACHE_CANDIDATES",
    "AoCache",
    "AoEncoderDecoderCache",
    "CachePlan",
    "CacheReport",
    "LayerChoice",
    "LayerMemory",
    "LayerOption",
    "UniformCache",
    "WiderKeysWarning",
    "plan_cache",
]
