"""`generate`: the text is that of the model, whatever makes it faster or smaller; bad options are refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

import ao_hf
from ao_core import QTensor, quantize_
from ao_core.ext import CheckpointError, ConfigError, UnknownNameError
from ao_hf.generation import (
    Loaded,
    Sampling,
    Workload,
    draft_of,
    generate,
    load,
    runner_of,
    tokens_of,
)

PROMPT = "What is a prime number?"


def greedy(loaded: Loaded, prompt: str, count: int, **options) -> list[int]:
    """Each token is the likeliest after all before it, by one pass over all of them."""
    row = tokens_of(loaded, prompt, **options)
    start = row.shape[1]
    for _ in range(count):
        row = torch.cat([row, loaded.model(row).logits[:, -1:].argmax(-1)], 1)
    return row[0, start:].tolist()


def test_text_comes_in_pieces_and_is_that_of_the_model(loaded):
    pieces: list[str] = []
    written = generate(loaded, PROMPT, on_text=pieces.append, max_new_tokens=20)
    assert list(written.tokens) == greedy(loaded, PROMPT, 20)
    assert "".join(pieces) == written.text == loaded.tokenizer.decode(written.tokens)
    assert written.prompt_tokens == tokens_of(loaded, PROMPT).shape[1]


def test_timing_leaves_the_token_of_the_prefill_out(loaded):
    timing = generate(loaded, PROMPT, max_new_tokens=9).timing
    assert (timing.tokens, timing.first, timing.steps, timing.rows) == (9, 1, 9, 1)
    assert timing.seconds_to_first > 0
    assert timing.decode_rate == pytest.approx(8 / timing.seconds_after)
    assert generate(loaded, PROMPT, max_new_tokens=1).timing.decode_rate == 0


def test_closing_line(loaded):
    written = generate(loaded, PROMPT, max_new_tokens=3)
    assert str(written).startswith("3 tokens; first after ")
    assert f"({written.prompt_tokens} of the prompt); then " in str(written)
    assert written.peak_bytes > 1e7  # of a process with torch
    assert str(generate(loaded, PROMPT, max_new_tokens=1)).startswith("1 token; ")


@pytest.mark.parametrize("recipe", ["int8_weight_only", "int4_weight_only"])
def test_quantized_while_loading(folder, recipe):
    loaded = load(folder, recipe, device="cpu")
    assert isinstance(loaded.model.model.layers[0].mlp.up_proj.weight, QTensor)
    assert list(generate(loaded, PROMPT, max_new_tokens=6).tokens) == greedy(loaded, PROMPT, 6)


def test_dtype(folder):
    assert load(folder, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_folder_that_ao_wrote(loaded, folder, tmp_path):
    quantize_(loaded.model, "int8_weight_only")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path, device="cpu")
    expected = generate(loaded, PROMPT, max_new_tokens=8).tokens
    assert generate(again, PROMPT, max_new_tokens=8).tokens == expected
    draft = draft_of(again, "int4")
    assert "int4" in str(draft.model.model.layers[0].mlp.up_proj.weight.spec)
    assert generate(again, PROMPT, max_new_tokens=8, draft=draft).tokens == expected
    with pytest.raises(ConfigError, match="quantized by ao already"):
        load(tmp_path, "int4_weight_only")


@pytest.mark.parametrize("recipe", [None, "int8_weight_only"])
def test_a_draft_changes_no_token(folder, recipe):
    target = load(folder, recipe, device="cpu")
    draft = draft_of(target, "int4")
    alone = generate(target, PROMPT, max_new_tokens=24)
    written = generate(target, PROMPT, max_new_tokens=24, draft=draft)
    assert written.tokens == alone.tokens
    assert written.drafted.checks < 24
    assert written.drafted.proposed >= written.drafted.accepted == 24 - written.drafted.checks > 0
    assert 0 < written.drafted.acceptance <= 1
    assert "drafted tokens accepted" in str(written)
    # and again: nothing is left behind on the draft
    assert generate(target, PROMPT, max_new_tokens=24, draft=draft).drafted == written.drafted


def test_a_draft_of_the_same_bits_is_always_accepted(folder):
    target = load(folder, "int8_weight_only", device="cpu")
    drafted = generate(target, PROMPT, max_new_tokens=20, draft=draft_of(target, "int8")).drafted
    assert drafted.acceptance == 1


def test_a_draft_shares_what_is_the_same(folder):
    target = load(folder, "int8_weight_only", device="cpu")
    draft = draft_of(target, "int4")
    own = dict(target.model.named_parameters())
    shared = {name for name, p in draft.model.named_parameters() if p is own[name]}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= shared
    assert not any(name.endswith("up_proj.weight") for name in shared)
    with torch.no_grad():
        own["model.norm.weight"].mul_(2)
    assert draft.model.model.norm.weight is own["model.norm.weight"]


def test_kv_is_the_cache_and_leaves_the_model_as_it_was(loaded):
    before = loaded.model.config._attn_implementation
    # all tokens are in the exact tail, or near it
    assert list(generate(loaded, PROMPT, max_new_tokens=10, kv="kv8").tokens) == greedy(
        loaded, PROMPT, 10
    )
    assert loaded.model.config._attn_implementation == before
    long = "abc " * 90  # whole blocks
    exact = generate(loaded, long, max_new_tokens=2)
    assert generate(loaded, long, max_new_tokens=2, kv="kv4").tokens[0] == exact.tokens[0]


def test_which_cache_served(loaded):
    assert generate(loaded, PROMPT, max_new_tokens=2).cache.startswith(
        "DynamicCache of transformers: "
    )
    config = copy.deepcopy(loaded.model.config)
    # heads and rows of which kernels make one op
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    quantize_(model, "int8_weight_only")
    ao_hf.fuse(model)
    fused = replace(loaded, model=model)
    found = generate(fused, PROMPT, max_new_tokens=5)
    assert found.cache == "exact"
    assert list(found.tokens) == greedy(fused, PROMPT, 5)
    assert generate(fused, PROMPT, max_new_tokens=2, kv="kv8").cache == "kv8"
    # a contender of a bench decodes over the same cache: keys and values of two layers and two heads
    assert runner_of(fused)(Workload(4, 3)).cache == 2 * 2 * 2 * 6 * 16 * 4


def test_samples_follow_the_seed_and_leave_the_programs_draws(loaded):
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=3)
    state = torch.get_rng_state()
    first = generate(loaded, PROMPT, max_new_tokens=12, sampling=sampling).tokens
    assert torch.equal(torch.get_rng_state(), state)
    assert generate(loaded, PROMPT, max_new_tokens=12, sampling=sampling).tokens == first
    other = Sampling(temperature=1.0, seed=4)
    assert generate(loaded, PROMPT, max_new_tokens=12, sampling=other).tokens != first


def test_a_conversation_is_put_into_the_template(loaded):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns.append({"role": "user", "content": "c"})
    text = loaded.tokenizer.decode(tokens_of(loaded, turns, system="s")[0])
    assert text == "system: s\nuser: a\nassistant: b\nuser: c\nassistant: "
    assert loaded.tokenizer.decode(tokens_of(loaded, "x", chat=False)[0]) == "x"


def test_what_is_not_compiled_is_told(loaded, monkeypatch):
    monkeypatch.setattr("ao_hf.generation.steps.can_step", lambda *_: False)
    monkeypatch.setattr(type(loaded.model), "_valid_auto_compile_criteria", lambda *_: False)
    with pytest.raises(
        ConfigError, match="compiled=True: transformers compiles no LlamaForCausalLM"
    ):
        generate(loaded, PROMPT, max_new_tokens=3, compiled=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "", "chat": False}, "prompt='': has no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: use 1 or more"),
        ({"max_new_tokens": 500}, r"the model is for 512 in all; use at most 47\d"),
        ({"prompt": "x" * 600}, "shorten the prompt"),
        ({"chat": False, "system": "s"}, "system: needs chat=True"),
    ],
)
def test_options_that_cannot_work(loaded, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(loaded, **({"prompt": PROMPT} | options))


def test_no_cache_of_that_name(loaded):
    with pytest.raises(UnknownNameError, match="Did you mean 'kv8'"):
        generate(loaded, PROMPT, kv="kv88")


def test_a_draft_is_not_compiled(loaded):
    with pytest.raises(ConfigError, match="compiled=True: a draft"):
        generate(loaded, PROMPT, draft=loaded, compiled=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: use 0"),
        ({"top_k": -1}, "top_k=-1: use 0"),
        ({"top_p": 0.0}, "top_p=0.0: use a probability"),
    ],
)
def test_sampling_that_cannot_work(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


def test_no_template(no_template):
    plain = load(no_template, device="cpu")
    assert tokens_of(plain, "ab").shape == (1, 2)
    for options in ({"chat": True}, {"system": "s"}):
        with pytest.raises(ConfigError, match="has no chat template"):
            tokens_of(plain, "ab", **options)
    with pytest.raises(ConfigError, match="a conversation: .* no chat template"):
        tokens_of(plain, [{"role": "user", "content": "a"}])


def test_no_tokenizer(loaded, tmp_path):
    loaded.model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load(tmp_path, device="cpu")
    without = load(tmp_path, device="cpu", tokenizer=False)
    with pytest.raises(ConfigError, match="tokenizer=True"):
        generate(without, PROMPT)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "int4_weight_onyl"}, UnknownNameError, "Did you mean 'int4_weight_only'"),
        ({"dtype": "int8"}, ConfigError, "dtype='int8': use one of auto"),
        ({"device": "gpu0"}, ConfigError, "device='gpu0': torch knows no such device"),
        ({"device": "xpu"}, ConfigError, "device='xpu': this machine has none"),
    ],
)
def test_loading_that_cannot_work(folder, options, error, message):
    with pytest.raises(error, match=message):
        load(folder, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent-model", "no ORG/NAME"),
        ("org/absent", "cannot be reached"),
        ("", "this folder has no config.json"),
    ],
)
def test_no_model_there(name, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load(name or tmp_path)
