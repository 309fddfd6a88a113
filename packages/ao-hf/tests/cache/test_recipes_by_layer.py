"""Caches whose layers have recipes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cached_models import decoder, ids, logits, sequence

from ao_core.ext import ConfigError, UnknownNameError
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_hf import AoCache, AoEncoderDecoderCache
from ao_quant.kv_cache import KV_RECIPES, KVCacheConfig


@pytest.fixture
def model() -> Any:
    made = decoder("llama")
    made.set_attn_implementation("ao_kv")
    return made


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["grows", "static"])
@pytest.mark.parametrize(
    "kv",
    [["kv8", "kv4"], ("kv8", KV_RECIPES["kv4"]), {0: "kv8", -1: "kv4"}],
    ids=["names", "configuration", "mapping"],
)
def test_each_layer_is_that_of_its_own_recipe(model: Any, kv: Any, options: dict[str, int]) -> None:
    tokens, more = ids(tokens=300), ids(tokens=5)
    made = AoCache(model.config, "kv8", **options)
    made.layers[1] = AoCache(model.config, "kv4", **options).layers[1]
    cache = AoCache(model.config, kv, **options)
    for part in (tokens, more):
        assert torch.equal(logits(model, part, cache), logits(model, part, made))
    for own, other in zip(cache.layers, made.layers, strict=True):
        leaves = zip(own.kv.tensors(), other.kv.tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in leaves)
    assert [x.recipe for x in cache.report().layers] == ["kv8", "kv4"]


@pytest.mark.parametrize("kv", [[None, "kv4"], ["exact", "kv4"], {1: "kv4"}])
def test_exact_layers_are_those_that_are_skipped(model: Any, kv: Any) -> None:
    tokens = ids()
    cache, skipped = AoCache(model.config, kv), AoCache(model.config, "kv4", skip_layers=[0])
    assert torch.equal(logits(model, tokens, cache), logits(model, tokens, skipped))
    assert type(cache.layers[0]) is type(skipped.layers[0])


def test_a_report_has_one_line_for_layers_that_are_alike() -> None:
    model = decoder("llama", num_hidden_layers=5)
    cache = AoCache(model.config, ["kv8", "kv4", "kv8", "kv8", None])
    logits(model, ids(), cache)
    lines = str(cache.report()).splitlines()
    assert [line.partition(" tokens")[0] for line in lines[1:]] == [
        "layers 0, 2-3: kv8, 300",
        "layer 1: kv4, 300",
        "layer 4: 300",
    ]
    assert "bytes each, 40 per token, keys int8" in lines[1]


def test_encoders_get_them_in_both_caches() -> None:
    model, inputs = sequence("t5")
    both = AoEncoderDecoderCache(model.config, {1: "kv4"})
    model.generate(**inputs, past_key_values=both, max_new_tokens=3, do_sample=False)
    crossed = both.cross_attention_cache.layers
    assert [type(x).__name__ for x in crossed] == ["DynamicLayer", "AoLayer"]
    assert (crossed[1].kv.window, crossed[1].kv.key.spec.dtype) == (0, "uint4")
    assert both.self_attention_cache.layers[1].settings.kv_config.window == 128


def test_what_is_refused(model: Any) -> None:
    config, hybrid = model.config, decoder("gemma3").config
    for kv, kind, message in (
        (["kv8"], ConfigError, "kv has 1 recipes, and this model has 2 layers"),
        ([], ConfigError, "kv has 0 recipes"),
        (["kv8", "kv9"], UnknownNameError, r"unknown KV cache recipe in kv\[1\] 'kv9'"),
        (["kv8", 4], ConfigError, r"kv\[1\]=4 \(int\): use a KVCacheConfig, None, or one of kv8"),
        ({}, ConfigError, "kv={}"),
        ({2: "kv8"}, ConfigError, "kv has 2 .*layers 0 to 1"),
        ({"0": "kv8"}, ConfigError, "kv has '0'"),
        ({1: "kv8", -1: "kv4"}, ConfigError, "kv has layer 1 twice, as 1 and -1"),
        (["kv8", KVCacheConfig(window=64)], ConfigError, "windows of 64, 128 tokens: use one"),
    ):
        with pytest.raises(kind, match=message):
            AoCache(config, kv)
    with pytest.raises(
        ConfigError, match="kv='kv8' for layer 0, which is sliding_attention: .*None"
    ):
        AoCache(hybrid, ["kv8", "kv8"])
    assert [type(x).__name__ for x in AoCache(hybrid, [None, "kv8"]).layers] == [
        "DynamicSlidingWindowLayer",
        "AoLayer",
    ]
    with pytest.warns(NothingConvertedWarning):
        AoCache(config, {0: "kv8"}, skip_layers=[0])
    AoCache(config, ["exact", None])
