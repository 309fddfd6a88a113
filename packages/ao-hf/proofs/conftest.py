"""A small random Llama, quantized, as a function of token ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ao_core import quantize_
from ao_core.ext import ConfigLike
from ao_hf.export.logits import LogitsModel


@pytest.fixture
def make_llama() -> Callable[..., LogitsModel]:
    def make(recipe: ConfigLike, dtype: torch.dtype = torch.float32) -> LogitsModel:
        config = LlamaConfig(
            vocab_size=67,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config).eval().to(dtype)
        quantize_(model, recipe)
        return LogitsModel(model)

    return make
