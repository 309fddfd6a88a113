"""Generation with quantized weights, in all ways that transformers has for it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from ao_hf import AoConfig

OPTIONS = {"pad_token_id": 0, "max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def model(dense):
    config = AoConfig("int8_weight_only")
    made = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    made.generation_config.eos_token_id = None  # else texts stop where random weights say so
    return made


@pytest.fixture
def greedy(model, tokens):
    """Each new token is the best after those before it, by one pass over all of them."""
    row = tokens[:1]
    for _ in range(OPTIONS["max_new_tokens"]):
        row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
    return row


@pytest.mark.parametrize(
    "way",
    [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 1}],
    ids=["cache", "static cache", "no cache", "one beam"],
)
def test_greedy(model, tokens, greedy, way):
    assert torch.equal(model.generate(tokens[:1], **OPTIONS, **way), greedy)


def test_assisted(model, tokens, greedy):
    made = model.generate(tokens[:1], assistant_model=copy.deepcopy(model), **OPTIONS)
    assert torch.equal(made, greedy)


def test_a_padded_batch_is_its_rows(model, tokens):
    mask = (tokens > 0).long()
    both = model.generate(tokens, attention_mask=mask, **OPTIONS)
    assert torch.equal(both[:1], model.generate(tokens[:1], **OPTIONS))
    assert torch.equal(both[1:, 2:], model.generate(tokens[1:, 2:], **OPTIONS))


def test_beams_find_what_is_at_least_as_likely(model, tokens):
    def likelihood(row):
        scores = model(row).logits.log_softmax(-1)[0, 3:-1]
        return scores.gather(1, row[0, 4:, None]).sum()

    beams = model.generate(tokens[:1], num_beams=4, length_penalty=0.0, **OPTIONS)
    greedy = model.generate(tokens[:1], **OPTIONS)
    assert likelihood(beams) >= likelihood(greedy) - 1e-4


def test_samples_follow_the_seed(model, tokens):
    options = OPTIONS | {"do_sample": True}
    torch.manual_seed(1)
    first = model.generate(tokens[:1], **options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(tokens[:1], **options), first)
    assert first.max() < 96
