"""`model.generate` with an exact cache gives the tokens and logits that it gives with transformers' own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cached_models import DECODERS, SEQUENCES, decoder, sequence
from transformers import CompileConfig, DynamicCache

from ao_core.ext import ConfigError
from ao_hf import AoCache, AoEncoderDecoderCache

WITH_ENCODER = {
    "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip
ROUTED = {"mixtral", "gpt_oss", "deepseek_v3", "jetmoe", "qwen3_next"}
OPTIONS = {
    "max_new_tokens": 12,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
}


def prompt(rows: int = 2, tokens: int = 300, padding: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 95, (rows, tokens))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def run(model: Any, cache: Any, inputs: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(
        **inputs, past_key_values=cache, **{**OPTIONS, "do_sample": False, **options}
    )


@pytest.mark.parametrize("name", DECODERS)
def test_models(name: str) -> None:
    model, inputs = decoder(name), prompt()
    options = {"output_logits": True}
    own = run(model, DynamicCache(config=model.config), inputs, **options)
    dense = run(model, AoCache(model.config, "exact"), inputs, **options)
    assert torch.equal(own.sequences, dense.sequences)
    assert all(map(torch.equal, own.logits, dense.logits))
    model.set_attn_implementation("ao_kv")
    cache = AoCache(model.config, None)
    read = run(model, cache, inputs, **options)
    assert torch.equal(own.sequences, read.sequences)
    for ours, theirs in zip(read.logits, own.logits, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()
    assert cache.report().tokens == 311
    kv8 = run(model, AoCache(model.config, "kv8"), inputs, **options)
    error = (kv8.logits[0] - own.logits[0]).norm() / own.logits[0].norm()
    # where a router chooses other experts, much changes at once
    assert 1e-4 < error <= (0.3 if name in ROUTED else 0.05)


MODES: dict[str, dict[str, Any]] = {
    "samples": {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "chunks": {"prefill_chunk_size": 50},
    "lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "ao_kv"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_modes(name: str, mode: str, attention: str, static: bool) -> None:
    model = decoder(name)
    inputs = prompt(rows=1, padding=0) if mode == "lookup" else prompt()
    own = run(model, DynamicCache(config=model.config), inputs, **MODES[mode])
    model.set_attn_implementation(attention)
    cache = AoCache(model.config, "exact", max_cache_len=400 if static else None)
    if static and mode == "lookup" and name == "gemma3":
        with pytest.raises(
            ConfigError, match="layer 0 is a StaticSlidingWindowLayer .* cannot forget"
        ):
            run(model, cache, inputs, **MODES[mode])
    else:
        found = run(model, cache, inputs, **MODES[mode])
        assert torch.equal(own.sequences, found.sequences)


@pytest.mark.parametrize("kv", ["exact", "k8v4"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_assistant_changes_no_token(name: str, kv: str) -> None:
    model, assistant, inputs = decoder(name), decoder(name), prompt(rows=1, padding=0)
    assistant.load_state_dict(model.state_dict())
    for parameter in assistant.lm_head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for each in (model, assistant):
        each.set_attn_implementation("ao_kv")
    plain = run(model, AoCache(model.config, kv), inputs, max_new_tokens=30)
    cache = AoCache(model.config, kv)
    found = run(model, cache, inputs, max_new_tokens=30, assistant_model=assistant)
    assert torch.equal(plain.sequences, found.sequences)
    assert cache.get_seq_length() == 329


@pytest.mark.parametrize("length", [None, 400])
@pytest.mark.parametrize("options", [{"guidance_scale": 1.5}, {"assistant_early_exit": 1}], ids=str)
def test_modes_that_run_the_model_twice(options: dict[str, Any], length: int | None) -> None:
    model, inputs = decoder("llama"), prompt(rows=1, padding=0)
    own = run(model, DynamicCache(config=model.config), inputs, **options)
    model.set_attn_implementation("ao_kv")
    cache = AoCache(model.config, "exact", max_cache_len=length)
    assert torch.equal(own.sequences, run(model, cache, inputs, **options).sequences)


@pytest.mark.parametrize("name", SEQUENCES)
def test_drafts_of_a_model_with_an_encoder(name: str) -> None:
    """Each is forgotten by the decoder's cache alone."""
    model, inputs = sequence(name)
    inputs = {key: x[:1] for key, x in inputs.items()}
    own = model.generate(**inputs, **WITH_ENCODER)
    model.set_attn_implementation("ao_kv")
    cache = AoEncoderDecoderCache(model.config, "exact")
    found = model.generate(
        **inputs, **WITH_ENCODER, prompt_lookup_num_tokens=3, past_key_values=cache
    )
    assert torch.equal(own.sequences, found.sequences)


def test_a_cache_that_is_too_small_says_what_is_needed() -> None:
    model, inputs = decoder("llama"), prompt(padding=0)
    cache = AoCache(model.config, "kv8", max_cache_len=305)
    with pytest.raises(
        ConfigError, match="1 tokens after 305 are 306, .* max_cache_len=306 or more"
    ):
        run(model, cache, inputs)


@pytest.mark.parametrize("static", [False, True])
def test_a_chat_goes_on_with_the_same_cache(static: bool) -> None:
    model, texts = decoder("llama"), []
    start = prompt(padding=0)["input_ids"]
    for attention, make in (("sdpa", DynamicCache), ("ao_kv", AoCache)):
        model.set_attn_implementation(attention)
        options: Any = {} if make is DynamicCache else {"kv": "exact"}
        if static and make is AoCache:
            options["max_cache_len"] = 600
        cache, text = make(config=model.config, **options), start
        torch.manual_seed(1)
        for turn in range(3):
            text = torch.cat([text, torch.randint(2, 95, (2, 20 * turn))], 1)
            mask = torch.ones_like(text)
            text = run(model, cache, {"input_ids": text, "attention_mask": mask}).sequences
        texts.append(text)
    assert torch.equal(*texts)
    assert texts[0].shape[1] == 300 + 60 + 36


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_static_caches_are_compiled_once(name: str, padding: int) -> None:
    model, inputs = decoder(name), prompt(padding=padding)
    model.set_attn_implementation("ao_kv")
    expected = run(model, AoCache(model.config, "kv8", max_cache_len=400), inputs)
    torch.compiler.reset()
    how = CompileConfig(fullgraph=True, backend="aot_eager", mode=None, dynamic=None)
    how._compile_all_devices = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what transformers does
        for stance in ("default", "fail_on_recompile"):
            with torch.compiler.set_stance(stance):
                cache = AoCache(model.config, "kv8", max_cache_len=400)
                found = run(model, cache, inputs, compile_config=how)
            assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.slow
def test_compiled_code_without_our_attention_is_refused() -> None:
    model = decoder("llama")
    cache = AoCache(model.config, "kv8", max_cache_len=64)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    with torch.no_grad(), pytest.raises(Exception, match="set_attn_implementation"):
        compiled(torch.tensor([[5, 6]]), past_key_values=cache)


# -- models with an encoder ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_encoder_and_decoder(name: str, options: dict[str, Any]) -> None:
    model, inputs = sequence(name)
    own = model.generate(**inputs, **{**WITH_ENCODER, **options})

    def distance(found: Any, steps: int = 8) -> float:
        a, b = (torch.stack(x.logits[:steps]) for x in (found, own))
        return float((a - b).norm() / b.norm())

    for attention, kv, length in (
        ("sdpa", "exact", None), ("ao_kv", "exact", None), ("ao_kv", "exact", 40), ("ao_kv", "kv8", None),
    ):  # fmt: skip
        model.set_attn_implementation(attention)
        cache = AoEncoderDecoderCache(model.config, kv, max_cache_len=length)
        found = model.generate(**inputs, **{**WITH_ENCODER, **options}, past_key_values=cache)
        if kv == "exact":
            assert torch.equal(found.sequences, own.sequences)
            # memory of a fixed size is a sum of other terms
            assert distance(found) <= (0 if attention == "sdpa" else 1e-6)
        else:
            assert (
                1e-5 < distance(found, steps=1) <= 0.05
            )  # beams that are as likely may differ after it
            crossed = cache.cross_attention_cache.layers[0].kv
            assert crossed.coded == crossed.tokens // 128 * 128 > 0
    assert cache.get_seq_length() > 0
    cache.crop(-1)
    with pytest.raises(ConfigError, match="AoEncoderDecoderCache"):
        model.generate(**inputs, **WITH_ENCODER, past_key_values=AoCache(model.config))
