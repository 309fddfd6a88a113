"""What programs do with a cache besides generating, and what is refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import decoder, ids, logits
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig

from ao_core.ext import ConfigError, MissingExtraError, UnknownNameError, UnsupportedOp
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_hf import AoCache
from ao_hf.cache.functions import functions
from ao_quant.kv_cache import KV_RECIPES, KVCacheConfig


@pytest.fixture
def model() -> Any:
    made = decoder("llama")
    made.set_attn_implementation("ao_kv")
    return made


def filled(model: Any, kv: Any = "kv8", **options: Any) -> AoCache:
    cache = AoCache(model.config, kv, **options)
    logits(model, ids(), cache)
    return cache


def states(cache: AoCache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.keys.dense(), layer.values.dense())]


def same(a: AoCache, b: AoCache) -> bool:
    return all(map(torch.equal, states(a), states(b)))


STATIC = pytest.mark.parametrize("static", [{}, {"max_cache_len": 400}], ids=["grows", "static"])


# -- the contract ----------------------------------------------------------------------------------


@STATIC
def test_rows_are_moved_on_codes(model: Any, static: dict[str, int]) -> None:
    cache = filled(model, **static)
    before = states(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(x[[1, 0]], y) for x, y in zip(before, states(cache), strict=True))
    cache.batch_repeat_interleave(2)
    assert all(torch.equal(x[[1, 1, 0, 0]], y) for x, y in zip(before, states(cache), strict=True))
    cache.batch_select_indices(torch.tensor([-1, 0]))
    assert all(torch.equal(x, y) for x, y in zip(before, states(cache), strict=True))
    cache.batch_select_indices(torch.tensor([False, True]))
    assert all(torch.equal(x[1:], y) for x, y in zip(before, states(cache), strict=True))
    assert logits(model, ids(1, 1), cache).shape[0] == 1


@STATIC
def test_crop_and_regrow(model: Any, static: dict[str, int]) -> None:
    tokens = ids(tokens=330)
    whole, cut = (AoCache(model.config, "kv4", **static) for _ in range(2))
    logits(model, tokens[:, :300], whole)
    last = logits(model, tokens[:, 300:], whole)
    logits(model, tokens[:, :300], cut)
    logits(model, ids(tokens=20), cut)
    cut.crop(-20)
    assert int(cut.get_seq_length()) == 300
    assert torch.equal(logits(model, tokens[:, 300:], cut), last)
    assert same(whole, cut)
    cut.crop(0)
    assert int(cut.get_seq_length()) == 330
    with pytest.raises(ValueError, match="tokens_to_remove=3"):
        cut.crop(3)
    cut.crop(-1000)
    assert int(cut.get_seq_length()) == 0


@STATIC
def test_reset_is_a_new_cache(model: Any, static: dict[str, int]) -> None:
    tokens, cache = ids(), filled(model, **static)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    fresh = AoCache(model.config, "kv8", **static)
    assert torch.equal(logits(model, tokens, cache), logits(model, tokens, fresh))
    assert same(cache, fresh)


def test_lengths_and_masks(model: Any) -> None:
    cache = filled(model)
    assert (cache.get_seq_length(), cache.get_max_length(), cache.get_mask_sizes(3, 0)) == (
        300,
        -1,
        (303, 0),
    )
    assert (cache.is_croppable, cache.is_compileable, cache.is_sliding) == (
        True,
        False,
        [False] * 2,
    )
    static = filled(model, max_cache_len=400)
    assert isinstance(static.get_seq_length(), torch.Tensor)
    assert (static.get_max_length(), static.get_mask_sizes(3, 1), static.is_compileable) == (
        400,
        (400, 0),
        True,
    )
    early = AoCache(model.config, "kv8", max_cache_len=400)
    early.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    assert early.is_initialized
    assert early.layers[0].kv.batch == 2


def test_offload_to_the_cpu_and_back(model: Any) -> None:
    """Here both are the CPU: nothing moves, and attention that was given the tokens before still has them."""
    cache = filled(model)
    before = states(cache)
    for layer in cache.layers:
        layer._move(torch.device("cpu"))
        layer.offload()
        layer.prefetch()
    assert all(map(torch.equal, before, states(cache)))


def test_layers_that_are_skipped_or_slide_are_those_of_transformers(model: Any) -> None:
    kinds = [type(x).__name__ for x in AoCache(model.config, skip_layers=[-1]).layers]
    assert kinds == ["AoLayer", "DynamicLayer"]
    gemma = decoder("gemma3").config
    kinds = [type(x).__name__ for x in AoCache(gemma).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "AoLayer"]
    kinds = [
        type(x).__name__ for x in AoCache(gemma, "exact", max_cache_len=30, skip_layers=[1]).layers
    ]
    assert kinds == ["StaticSlidingWindowLayer", "StaticLayer"]
    tokens = ids()
    own = logits(model, tokens, DynamicCache(config=model.config))
    with pytest.warns(NothingConvertedWarning, match="no layer of this LlamaConfig is quantized"):
        kept = AoCache(model.config, "kv4", skip_layers=[0, 1])
    assert torch.equal(logits(model, tokens, kept), own)


def test_report(model: Any) -> None:
    cache = filled(model, "kv4", skip_layers=[0])
    found = cache.report()
    assert [x.layer for x in found.layers] == [0, 1]
    assert (found.tokens, found.layers[0].nbytes) == (300, 2 * 2 * 2 * 300 * 8 * 4)
    assert found.nbytes == sum(x.nbytes for x in found.layers)
    # two heads of 8: keys of 4 bits with 4 bytes per channel of 128 tokens, values with 4 bytes per token
    assert found.bytes_per_token == 2 * (4 + 8 * 4 / 128 + 4 + 4)
    assert "uint4" in str(found)
    assert repr(cache) == f"AoCache(2 layers, 300 tokens, {found.nbytes} bytes)"


# -- copies, threads, contexts ---------------------------------------------------------------------


def test_copies_are_other_caches(model: Any) -> None:
    cache = filled(model)
    made = copy.deepcopy(cache)
    assert made.model_config is model.config
    again = pickle.loads(pickle.dumps(cache))
    tokens = ids(tokens=1)
    found = logits(model, tokens, made)
    assert cache.get_seq_length() == 300
    assert torch.equal(found, logits(model, tokens, cache))
    assert torch.equal(found, logits(model, tokens, again))


@pytest.mark.slow
def test_another_process_goes_on(model: Any, tmp_path: Path) -> None:
    cache, token = filled(model), ids(tokens=1)
    torch.save((cache, model.state_dict(), token), tmp_path / "cache")
    expected = logits(model, token, cache)
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[2])\n"
        "from cached_models import decoder\n"
        "cache, weights, token = torch.load(sys.argv[1], weights_only=False)\n"
        "model = decoder('llama'); model.load_state_dict(weights); model.set_attn_implementation('ao_kv')\n"
        "with torch.no_grad(): out = model(token, past_key_values=cache).logits\n"
        "torch.save(out, sys.argv[1])\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "cache", Path(__file__).parent], check=True
    )
    assert torch.equal(torch.load(tmp_path / "cache"), expected)


def test_two_threads_with_two_caches(model: Any) -> None:
    tokens = [ids(), ids()]
    expected = [logits(model, x, AoCache(model.config)) for x in tokens]
    found: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        found[i] = logits(model, tokens[i], AoCache(model.config))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(2))


def test_one_cache_in_two_threads_is_refused(model: Any) -> None:
    cache = filled(model)
    new = torch.randn(2, 2, 1, 8)
    cache.update(new, new, 0)
    said: list[Exception] = []

    def work() -> None:
        try:
            cache.update(new, new, 0)
        except ConfigError as error:
            said.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "two threads use one cache" in str(said[0])
    cache.update(new, new, 1)
    assert cache.get_seq_length() == 301
    thread = threading.Thread(target=logits, args=(model, ids(tokens=1), cache))
    thread.start()
    thread.join()
    assert cache.get_seq_length() == 302  # one after the other is fine


@STATIC
def test_inference_mode_leaves_no_trace(model: Any, static: dict[str, int]) -> None:
    tokens = ids(tokens=340)
    cache = AoCache(model.config, "k8v4", **static)
    with torch.inference_mode():
        model(tokens[:, :300], past_key_values=cache)
        cache.batch_repeat_interleave(1)
    model(tokens[:, 300:320], past_key_values=cache)
    with torch.inference_mode():
        model(tokens[:, 320:], past_key_values=cache)
    other = AoCache(model.config, "k8v4", **static)
    for part in tokens.split([300, 20, 20], 1):
        logits(model, part, other)
    assert same(cache, other)


@pytest.mark.parametrize("attention", ["sdpa", "ao_kv"])
def test_autocast(attention: str) -> None:
    model, tokens = decoder("llama"), ids(tokens=301)
    model.set_attn_implementation(attention)
    with torch.autocast("cpu", torch.bfloat16):
        own, cache = DynamicCache(config=model.config), AoCache(model.config, "exact")
        for part in tokens.split([300, 1], 1):
            theirs, ours = (logits(model, part, each) for each in (own, cache))
    assert cache.layers[0].kv.dtype == torch.bfloat16
    assert (ours - theirs).norm() <= 3e-2 * theirs.norm()


def test_training_with_a_cache(model: Any) -> None:
    tokens = ids()
    cache = AoCache(model.config)
    out = model(tokens, past_key_values=cache, labels=tokens)
    with pytest.raises(UnsupportedOp, match="no gradient"):
        out.loss.backward()
    model.train()
    model.activation_checkpointing_enable()
    unused = AoCache(model.config)
    model(tokens, past_key_values=unused, labels=tokens, use_cache=True).loss.backward()
    assert unused.get_seq_length() == 0  # transformers turns caches off then
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_dropout_is_that_of_the_model() -> None:
    model = decoder("llama", attention_dropout=0.5).train()
    tokens, found = ids(), []
    for kind, attention in ((AoCache, "ao_kv"), (DynamicCache, "sdpa")):
        model.set_attn_implementation(attention)
        torch.manual_seed(0)
        cache = (
            AoCache(model.config, "exact") if kind is AoCache else DynamicCache(config=model.config)
        )
        found.append(logits(model, tokens, cache))
    assert torch.equal(*found)


# -- what is refused -------------------------------------------------------------------------------


def test_arguments(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model.config
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for call, kind, message in (
        (lambda: AoCache(model), ConfigError, "model.config"),
        (lambda: AoCache(config, "kv9"), UnknownNameError, "unknown KV cache recipe 'kv9'"),
        (lambda: AoCache(config, 8), ConfigError, "use a KVCacheConfig"),  # type: ignore[arg-type]
        (lambda: AoCache(config, max_cache_len=0), ConfigError, "max_cache_len=0"),
        (lambda: AoCache(config, skip_layers=[2]), ConfigError, "layers 0 to 1"),
        (lambda: AoCache(config, largest_error=-1.0), ConfigError, "largest_error=-1.0"),
        (lambda: AoCache(config, offloading=True), ConfigError, "offloading=True: .* none; leave"),
    ):
        with pytest.raises(kind, match=message):
            call()
    assert AoCache(config, KVCacheConfig(window=7)).layers[0].settings.kv_config.window == 7
    functions.cache_clear()
    monkeypatch.setitem(sys.modules, "ao_quant.kv_cache", None)
    with pytest.raises(
        MissingExtraError, match='AoCache needs the package.*pip install "ao-quant"'
    ):
        AoCache(config)


def test_tokens_that_do_not_fit(model: Any) -> None:
    cache = filled(model)
    token = ids(tokens=1)
    for tokens in (ids(1, 1), ids(3, 1)):
        with pytest.raises(ConfigError, match=r"this cache takes \(2, 2, T, 8\): a batch of 2"):
            logits(model, tokens, cache)
    with pytest.raises(ConfigError, match=r"key is torch.bfloat16 .* this cache is torch.float32"):
        logits(copy.deepcopy(model).bfloat16(), token, cache)
    elsewhere = torch.empty(2, 2, 1, 8, device="meta")
    with pytest.raises(ConfigError, match="on meta, and this cache is torch.float32 on cpu"):
        cache.update(elsewhere, elsewhere, 0)
    other = decoder("llama", num_key_value_heads=4)
    with pytest.raises(ConfigError, match="2 heads"):
        logits(other, token, cache)
    deeper = decoder("llama", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="cache for 2 layers"):
        logits(deeper, token, AoCache(model.config))
    assert logits(model, token, cache).isfinite().all()  # as it was
    full = filled(model, max_cache_len=301)
    with pytest.raises(
        ConfigError, match="2 tokens after 300 are 302, .* max_cache_len=302 or more"
    ):
        logits(model, ids(tokens=2), full)
    assert logits(model, token, full).isfinite().all()


def test_a_failed_forward_and_a_cross_attention_without_its_own_cache(model: Any) -> None:
    cache, new = filled(model), torch.randn(2, 2, 1, 8)
    cache.update(new, new, 0)
    with pytest.raises(ConfigError, match=r"layer 0 is written twice.*reset\(\)"):
        cache.update(new, new, 0)
    cache.reset()
    logits(model, ids(), cache)


def test_stale_keys(model: Any) -> None:
    cache = filled(model)
    keys = cache.layers[0].keys
    logits(model, ids(tokens=1), cache)
    with pytest.raises(UnsupportedOp, match="are of 300 tokens, and the cache now has 301"):
        keys + 1


def test_plain_containers(model: Any) -> None:
    pair = EncoderDecoderCache(filled(model), filled(model))
    assert pair.get_seq_length() == 300
    assert isinstance(model.config, LlamaConfig)
    assert set(KV_RECIPES) >= {"kv8", "k8v4", "kv4"}
