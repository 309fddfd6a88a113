"""The model reads its keys and values from the cache, and the figures are of what that changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import kv_cache
import pytest
import torch
from smollm2 import model

from ao_core import WHOLE, Spec
from ao_core.ext import NO_SCALE
from ao_quant.kv_cache import KV_RECIPES, KVCacheConfig

METADATA = {
    "llama.vocab_size": 97,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
}
EXACT = KVCacheConfig(*[Spec("fp32", (1, WHOLE), NO_SCALE)] * 2, window=0, center=False)


@pytest.mark.parametrize(
    ("config", "low", "high"),
    [
        (EXACT, 0.0, 1e-6),
        (replace(KV_RECIPES["kv8"], window=0), 1e-6, 1e-4),
        (replace(KV_RECIPES["kv4"], window=0), 1e-4, 1e-2),
    ],
)
def test_what_the_cache_changes(config: KVCacheConfig, low: float, high: float) -> None:
    from transformers import AttentionInterface

    network: Any = model.from_metadata(METADATA).eval()
    window, sizes = torch.randint(0, 97, (256,)), []
    exact = kv_cache.predict(network, window)
    AttentionInterface.register("ao_test", partial(kv_cache.attention, config, sizes))
    network.set_attn_implementation("ao_test")
    found = kv_cache.predict(network, window)
    assert len(sizes) == 2
    assert low <= (found - exact).norm() / exact.norm() <= high
