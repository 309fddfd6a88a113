"""Quantized caches of keys and values: configurations, the state of one layer, and what is done to it.

See [Quantized KV caches](../kv-cache.md).
"""

from __future__ import annotations

from ao_quant.kv_cache.config import BLOCK, KV_RECIPES, KVCacheConfig, kv_config
from ao_quant.kv_cache.edit import (
    append,
    crop_,
    exact_like,
    grown,
    reorder_,
    repeat,
    reset_,
    select,
    widened,
)
from ao_quant.kv_cache.state import (
    QuantizedKV,
    attend_to,
    bytes_per_token,
    coded_tokens,
    dequantized,
    new_kv,
)
from ao_quant.kv_cache.update import append_

__all__ = [
    "BLOCK",
    "KV_RECIPES",
    "KVCacheConfig",
    "QuantizedKV",
    "append",
    "append_",
    "attend_to",
    "bytes_per_token",
    "coded_tokens",
    "crop_",
    "dequantized",
    "exact_like",
    "grown",
    "kv_config",
    "new_kv",
    "reorder_",
    "repeat",
    "reset_",
    "select",
    "widened",
]
