"""Transforms of models of transformers: Llama, Qwen3, Gemma, GPT-2, BERT; folders of what was untied."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf

from ao_core import QTensor, quantize_
from ao_quant import (
    EqualizeConfig,
    GPTQConfig,
    Int4DynamicActivationInt4WeightConfig,
    RotateConfig,
    SmoothQuantConfig,
)

_TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
_BERT = {
    key: value for key, value in _TEXT.items() if key not in ("num_key_value_heads", "head_dim")
}
_GPT2 = {
    "vocab_size": 96, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 4,
    "initializer_range": 0.1,
}  # fmt: skip
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_TEXT, tie_word_embeddings=True)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_TEXT)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_TEXT)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**_GPT2)),
    "bert": lambda: tf.BertModel(tf.BertConfig(**_BERT), add_pooling_layer=False),
}
#: families whose residual stream is rotated; BERT adds what a LayerNorm gives, gains and all
ROTATED = ("llama", "qwen3", "gemma", "gpt2")


def made(family):
    """With gains and biases that are not 1 and 0."""
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(0.3 * torch.rand_like(tensor))
    return model


def batches():
    return [
        {"input_ids": torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(seed))}
        for seed in range(3)
    ]


def output(model, batch):
    found = model(**batch)
    return (found.logits if "logits" in found else found.last_hidden_state).detach()


def data_of(family):
    uncached = {} if family == "bert" else {"use_cache": False}
    return [batch | uncached for batch in batches()]


@pytest.mark.parametrize("family", MODELS)
def test_the_model_computes_the_same(family):
    dense, data = made(family), data_of(family)
    expected = output(dense, data[0])
    configs = [SmoothQuantConfig(), EqualizeConfig()]
    configs += [RotateConfig()] if family in ROTATED else [RotateConfig(residual=False)]
    for config in configs:
        model = copy.deepcopy(dense)
        report = quantize_(model, config, data=data)
        error = float((output(model, data[0]) - expected).norm() / expected.norm())
        assert error < 1e-5, config
        assert any(record.note for record in report)
        assert report.with_status("changed")


def test_a_folder_of_a_model_that_was_rotated(tmp_path):
    model, data = made("llama"), data_of("llama")
    stack = [RotateConfig(), GPTQConfig(Int4DynamicActivationInt4WeightConfig(32))]
    quantize_(model, stack, data=data)
    assert isinstance(model.lm_head.weight, QTensor)
    assert not isinstance(model.model.embed_tokens.weight, QTensor)
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(output(loaded, data[0]), output(model, data[0]))
