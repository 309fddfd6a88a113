"""Codes do not depend on how tokens come: at once, one by one, in chunks, or after a part was forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Spec
from ao_core.ext import NO_SCALE
from ao_quant.kv_cache import (
    KV_RECIPES,
    KVCacheConfig,
    QuantizedKV,
    append,
    append_,
    attend_to,
    coded_tokens,
    crop_,
    dequantized,
    kv_config,
    new_kv,
    reset_,
)

TOKENS = 430
#: nested scales, scales of 32 tokens that a cut goes through, an odd width
NESTED = KVCacheConfig(
    Spec("int6", (32, 8), Spec("int8", (1, WHOLE)), layout="packed"),
    Spec("nf4", (4, 16), "bfloat16", layout="packed"),
    window=3,
    rotate="both",
)
CONFIGS = {**{name: kv_config(name) for name in KV_RECIPES}, "nested": NESTED}


def pair(tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    offset = 3 * torch.randn(1, 2, 1, 40)
    return (torch.randn(2, 2, tokens, 40) + offset).to(dtype), torch.randn(2, 2, tokens, 24).to(
        dtype
    )


def made(config: KVCacheConfig, capacity: int = TOKENS) -> QuantizedKV:
    return new_kv(config, 2, 2, 40, capacity, value_dim=24)


def feed(kv: QuantizedKV, k: Tensor, v: Tensor, chunks: Sequence[int]) -> QuantizedKV:
    for new_k, new_v in zip(k.split(list(chunks), 2), v.split(list(chunks), 2), strict=True):
        append_(kv, new_k, new_v)
    return kv


def in_use(kv: QuantizedKV) -> list[Tensor]:
    """Codes and scales of the blocks, the center, the counts, and the tokens of the tail."""
    counts, tail_key, tail_value, *rest = kv.tensors()
    slots = torch.arange(kv.coded, kv.tokens) % tail_key.shape[2]
    return [counts, tail_key[:, :, slots], tail_value[:, :, slots], *rest]


def same(a: QuantizedKV, b: QuantizedKV) -> bool:
    return all(map(torch.equal, in_use(a), in_use(b)))


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("name", CONFIGS)
def test_codes_are_those_of_one_prefill(name: str, window: int) -> None:
    config, (k, v) = replace(CONFIGS[name], window=window), pair()
    whole = feed(made(config), k, v, [TOKENS])
    assert (whole.tokens, whole.coded) == (TOKENS, coded_tokens(TOKENS, window))
    assert whole.coded == (384 if window == 0 else 256)
    assert same(whole, feed(made(config), k, v, [1, 127, 200, 0, 5, 97]))
    assert same(whole, feed(made(config), k, v, [100, *[1] * (TOKENS - 100)]))


@pytest.mark.parametrize("left", [0, 100, 131, 256, 300])
@pytest.mark.parametrize("name", CONFIGS)
def test_codes_are_the_same_after_crop_and_regrow(name: str, left: int) -> None:
    config, (k, v) = CONFIGS[name], pair()
    whole = feed(made(config), k, v, [TOKENS])
    kv = feed(made(config), k, v, [TOKENS])
    crop_(kv, left)
    assert (kv.tokens, kv.coded) == (left, min(left, whole.coded))
    assert same(whole, feed(kv, k[:, :, left:], v[:, :, left:], [7, TOKENS - left - 7]))


@pytest.mark.parametrize("name", CONFIGS)
def test_forgetting_less_than_the_window_leaves_no_trace(name: str) -> None:
    config, (k, v) = replace(CONFIGS[name], window=40), pair()
    wrong = [x.clone() for x in (k, v)]
    for x in wrong:
        x[:, :, 270:] *= 5
    kv = feed(made(config), wrong[0][:, :, :310], wrong[1][:, :, :310], [310])
    crop_(kv, 270)
    feed(kv, k[:, :, 270:], v[:, :, 270:], [TOKENS - 270])
    assert same(kv, feed(made(config), k, v, [TOKENS]))


def test_a_cut_block_keeps_its_codes_and_its_scales() -> None:
    config, (k, v) = replace(CONFIGS["kv4"], window=0), pair()
    kv = feed(made(config), k, v, [TOKENS])
    before, _ = dequantized(kv)
    crop_(kv, 200)
    append_(kv, torch.zeros_like(k[:, :, 200:]), v[:, :, 200:])
    after, _ = dequantized(kv)
    assert torch.equal(after[:, :, :200], before[:, :, :200])
    # zeros by scales of other tokens, of 16 codes for a range that holds 0
    span = (k[:, :, 128:256].amax(2) - k[:, :, 128:256].amin(2)).amax()
    assert 0 < after[:, :, 200:256].abs().max() <= 12 * span
    assert after[:, :, 256:].abs().max() <= 1e-2  # by scales of their own


def test_reset_forgets_all_and_finds_another_center() -> None:
    (k, v), (other_k, other_v) = pair(), pair()
    kv = feed(made(CONFIGS["kv8"]), k, v, [TOKENS])
    reset_(kv)
    assert (kv.tokens, kv.coded) == (0, 0)
    feed(kv, other_k, other_v, [TOKENS])
    assert same(kv, feed(made(CONFIGS["kv8"]), other_k, other_v, [TOKENS]))
    assert torch.equal(kv.center, other_k[:, :, :128].float().mean(2, keepdim=True))


def test_a_growing_cache_has_the_same_codes() -> None:
    k, v = pair()
    kv = first = made(CONFIGS["k8v4"], 1)
    for new_k, new_v in zip(k.split(61, 2), v.split(61, 2), strict=True):
        kv = append(kv, new_k, new_v)
    assert kv.capacity > first.capacity
    assert same(kv, feed(made(CONFIGS["k8v4"], kv.capacity), k, v, [TOKENS]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_formats_are_a_cache_that_rounds_nothing(dtype: torch.dtype) -> None:
    name = "fp32" if dtype == torch.float32 else "bf16"
    spec = Spec(name, (1, WHOLE), NO_SCALE)
    k, v = pair(dtype=dtype)
    kv = new_kv(
        KVCacheConfig(spec, spec, center=False), 2, 2, 40, TOKENS, value_dim=24, dtype=dtype
    )
    feed(kv, k, v, [300, 130])
    assert all(map(torch.equal, dequantized(kv), (k, v)))
    q = torch.randn(2, 4, 3, 40).to(dtype)
    seen = torch.ones(3, TOKENS, dtype=torch.bool).tril(TOKENS - 3)
    exact, torchs = (
        F.scaled_dot_product_attention(*each, attn_mask=seen, enable_gqa=True)
        for each in ([x.double() for x in (q, k, v)], (q, k, v))
    )
    ours, theirs = ((x.double() - exact).norm() for x in (attend_to(kv, q), torchs))
    assert 0 < ours <= 2 * theirs


#: relative error of the output, at least and at most
ERRORS = {"kv8": (3e-3, 1.5e-2), "k8v4": (4e-2, 0.11), "kv4": (5e-2, 0.25), "kv_fp8": (1e-2, 6e-2)}


@pytest.mark.parametrize("name", ERRORS)
def test_error_of_the_output(name: str) -> None:
    k, v = pair(dtype=torch.float32)
    config = replace(KV_RECIPES[name], window=0)
    kv = new_kv(config, 2, 2, 40, TOKENS, value_dim=24, dtype=torch.float32)
    feed(kv, k, v, [TOKENS])
    q = torch.randn(2, 6, 100, 40)
    exact = F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(100, TOKENS, dtype=torch.bool).tril(330), enable_gqa=True
    )
    error = (attend_to(kv, q) - exact).norm() / exact.norm()
    low, high = ERRORS[name]
    assert low <= error <= high


def test_centering_keeps_what_all_keys_share_out_of_the_codes() -> None:
    k, v = pair(dtype=torch.float32)
    k = k + 30  # the same for all tokens
    errors = []
    for center in (True, False):
        config = KVCacheConfig(window=0, center=center)
        kv = new_kv(config, 2, 2, 40, TOKENS, value_dim=24, dtype=torch.float32)
        append_(kv, k, v)
        errors.append((dequantized(kv)[0] - k).norm())
    assert errors[0] < 0.2 * errors[1]
