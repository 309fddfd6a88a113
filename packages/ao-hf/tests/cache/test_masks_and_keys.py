"""Masks that a cache cannot read codes by, and keys that do not survive their format."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from cached_models import decoder, ids, logits
from transformers import DynamicCache

from ao_hf import AoCache
from ao_hf.cache import WiderKeysWarning


@pytest.fixture
def model() -> Any:
    made = decoder("llama")
    made.set_attn_implementation("ao_kv")
    return made


# -- masks -----------------------------------------------------------------------------------------


def test_padding_with_holes_and_masks_of_tokens(model: Any) -> None:
    tokens = ids()
    holes = torch.ones_like(tokens)
    holes[0, 40:60] = 0
    right = torch.ones_like(tokens)
    right[1, 280:] = 0
    square = torch.rand(2, 1, 300, 300).lt(0.7).tril() | torch.eye(300, dtype=torch.bool)
    for mask in (holes, right, square):
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            own = model(
                tokens, attention_mask=mask, past_key_values=DynamicCache(config=model.config)
            ).logits
            model.set_attn_implementation("ao_kv")
            found = model(
                tokens, attention_mask=mask, past_key_values=AoCache(model.config, "exact")
            ).logits
        assert (found - own).norm() <= 1e-5 * own.norm()


def test_without_a_cache_the_attention_is_that_of_transformers(model: Any) -> None:
    tokens, padded = ids(), torch.ones(2, 300, dtype=torch.int64)
    padded[0, :7] = 0
    packed = torch.arange(150).repeat(2)[None].expand(2, -1)
    for options in ({}, {"attention_mask": padded}, {"position_ids": packed}):
        for cache in (None, DynamicCache(config=model.config)):
            if cache is not None and "position_ids" in options:
                continue
            found = []
            for attention in ("sdpa", "ao_kv"):
                model.set_attn_implementation(attention)
                fresh = copy.deepcopy(cache)
                with torch.no_grad():
                    out = model(
                        tokens, past_key_values=fresh, use_cache=cache is not None, **options
                    )
                    found.append(out.logits)
            rows = (
                padded.bool()
                if "attention_mask" in options
                else torch.ones(2, 300, dtype=torch.bool)
            )
            assert torch.equal(found[0][rows], found[1][rows])


# -- keys that do not survive ----------------------------------------------------------------------


def biased(size: float) -> Any:
    model = decoder("qwen2", num_hidden_layers=3, head_dim=16)
    with torch.no_grad():
        bias = model.model.layers[1].self_attn.k_proj.bias
        bias.zero_()
        bias[::7] = size
    return model


def kl(a: torch.Tensor, b: torch.Tensor) -> float:
    p, q = (x[:, 200:].log_softmax(-1) for x in (a, b))
    return float((q.exp() * (q - p)).sum(-1).mean())


@pytest.mark.parametrize(("kv", "size"), [("kv8", 300.0), ("kv4", 300.0), ("k8v4", 300.0)])
def test_large_biases_get_wider_keys_and_a_sentence(kv: str, size: float) -> None:
    model, tokens = biased(size), ids(tokens=400)
    own = logits(model, tokens, DynamicCache(config=model.config))
    model.set_attn_implementation("ao_kv")
    cache = AoCache(model.config, kv)
    with pytest.warns(
        WiderKeysWarning, match=rf"the keys of {kv}.*layer 1 \(off by .*skip_layers=\[1\]"
    ):
        found = logits(model, tokens, cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unchecked = logits(model, tokens, AoCache(model.config, kv, largest_error=math.inf))
    assert kl(found, own) < 0.7 * kl(unchecked, own)
    notes = [x.note for x in cache.report().layers]
    assert [bool(x) for x in notes] == [False, True, False]
    assert "int8[128×1]" in cache.report().layers[1].key
    chunks, parts = AoCache(model.config, kv), tokens.split([200, 55, 1, 144], 1)
    logits(model, parts[0], chunks)
    logits(model, parts[1], chunks)
    with pytest.warns(WiderKeysWarning):
        logits(model, parts[2], chunks)
    logits(model, parts[3], chunks)
    assert chunks.layers[1].kv.key.spec == cache.layers[1].kv.key.spec


def test_keys_that_nothing_holds_stay_exact() -> None:
    model, tokens = biased(3e5), ids()
    model.set_attn_implementation("ao_kv")
    cache = AoCache(model.config, "kv4", max_cache_len=400)
    with pytest.warns(WiderKeysWarning, match="now exact"):
        logits(model, tokens, cache)
    assert cache.layers[1].kv.key.spec.dtype == "fp32"
    assert cache.layers[0].kv.key.spec.dtype == "uint4"
