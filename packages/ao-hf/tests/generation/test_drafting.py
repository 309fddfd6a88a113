"""Drafted decoding: what is proposed, and that texts are those of the model alone."""

from __future__ import annotations

import pytest
import torch

import ao_hf
from ao_core import batch_invariant
from ao_core.ext import ConfigError
from ao_hf import AoCache
from ao_hf.generation import Sampling, draft_of, generate, load
from ao_hf.generation.drafting import Counts, ModelDraft, lookup, speculating

PROMPT = "What is a prime number?"


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([5, 1, 2, 6, 9, 1, 2, 7, 1, 2], 1, [7]),  # the last time
        ([5, 1, 2, 6, 9, 1, 2, 7, 5, 1, 2], 1, [6]),  # three tokens before two
        ([1, 2, 3], 3, []),
        ([1, 1], 3, []),
        ([1, 1, 1], 3, [1]),
    ],
)
def test_what_is_looked_up(text, count, found):
    assert lookup(text, count) == found


def test_a_model_proposes_after_any_text(loaded):
    model = loaded.model
    draft = ModelDraft(model, AoCache(model.config, None))
    for text in ([5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 9], [5], [5, 6, 9, 10, 11]):
        expected = list(text)
        for _ in range(3):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert draft(text, 3) == expected[len(text) :]


@pytest.mark.parametrize("draft", ["int4", "lookup"])
@pytest.mark.parametrize("kv", [None, "kv8"])
def test_a_seed_gives_the_same_text_with_and_without(folder, draft, kv):
    target = load(folder, "int8_weight_only", device="cpu")
    if draft != "lookup":
        draft = draft_of(target, draft)
        ao_hf.fuse(draft.model)
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=4, seed=3)):
        options = {"max_new_tokens": 150, "sampling": sampling, "kv": kv}
        alone = generate(target, PROMPT, **options)
        written = generate(target, PROMPT, draft=draft, **options)
        assert written.tokens == alone.tokens
        drafted = written.drafted
        assert drafted.checks + drafted.accepted == len(alone.tokens)
        assert drafted.accepted <= drafted.proposed > 0


@pytest.mark.parametrize("recipe", [None, "int8_weight_only"])
@pytest.mark.parametrize("kv", [None, "kv8", "kv4"])
def test_checks_in_bfloat16_change_nothing(folder, recipe, kv):
    target = load(folder, recipe, device="cpu", dtype="bfloat16")
    draft = draft_of(target, "int4" if recipe is None else "nibbles")
    for one in (target, draft):
        ao_hf.fuse(one.model)
    options = {"max_new_tokens": 300, "kv": kv}  # blocks of the cache become due meanwhile
    with batch_invariant():
        alone = generate(target, PROMPT, **options)
        drafted = generate(target, PROMPT, draft=draft, **options)
    assert drafted.tokens == alone.tokens
    assert drafted.drafted.checks < len(alone.tokens)


def test_nibbles_are_of_int8(folder):
    target = load(folder, "int8_weight_only", device="cpu")
    draft = draft_of(target, "nibbles").model
    codes = target.model.model.layers[0].mlp.down_proj.weight
    upper = draft.model.layers[0].mlp.down_proj.weight
    step = 16 * codes.canonical().parts["scale"].float().reshape(-1, 1)
    change = upper.dequantize(torch.float32) - codes.dequantize(torch.float32)
    assert (change.abs() <= 0.5 * step).all()
    assert upper.stored_bytes < 0.6 * codes.stored_bytes
    assert draft.get_input_embeddings().weight is target.model.get_input_embeddings().weight
    with pytest.raises(ConfigError, match="has no weights in int8"):
        draft_of(load(folder, device="cpu"), "nibbles")


def test_pieces_come_as_they_are_checked(loaded):
    pieces: list[str] = []
    written = generate(loaded, PROMPT, max_new_tokens=30, draft=loaded, on_text=pieces.append)
    assert "".join(pieces) == written.text
    timing = written.timing
    assert (timing.tokens, timing.first, timing.steps) == (30, 1, written.drafted.checks)
    assert timing.decode_rate > 0


def test_a_text_ends_within_what_is_proposed(loaded):
    alone = generate(loaded, PROMPT, max_new_tokens=30).tokens
    loaded.model.generation_config.eos_token_id = alone[20]
    expected = alone[: alone.index(alone[20]) + 1]
    assert generate(loaded, PROMPT, max_new_tokens=30, draft=loaded).tokens == expected


def test_more_is_proposed_while_all_is_accepted(loaded):
    asked, model = [], loaded.model
    expected = generate(loaded, PROMPT, max_new_tokens=40)
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )["input_ids"]  # fmt: skip
    length, counts = ids.shape[1], Counts()

    def propose(text, count):
        asked.append(count)
        start = len(text) - length
        return [] if start > 30 else list(expected.tokens[start : start + count])

    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=AoCache(model.config, None),
        max_new_tokens=40, do_sample=False, pad_token_id=0, custom_generate=speculating(propose, counts),
    )  # fmt: skip
    assert asked == [4, 6, 8, 8, 8, 7, 6, 5, 4, 3, 2, 1][: len(asked)] or asked[:5] == [
        4,
        6,
        8,
        8,
        8,
    ]
    assert counts.accepted == counts.proposed


def test_another_draft_is_refused(loaded):
    with pytest.raises(ConfigError, match="draft='int4': use 'lookup', or what `draft_of"):
        generate(loaded, PROMPT, draft="int4")
