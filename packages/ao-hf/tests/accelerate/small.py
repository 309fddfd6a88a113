"""A small language model, and what it says."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor, nn

__all__ = ["DTYPES", "FORMATS", "TOKENS", "build", "empty", "logits"]

FORMATS = ("int8_weight_only", "nf4_weight_only")
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = torch.arange(1, 11).reshape(2, 5)


def build(tied: bool = False) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=96, max_position_embeddings=32, tie_word_embeddings=tied,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()


def empty(tied: bool = False) -> nn.Module:
    with accelerate.init_empty_weights():
        return build(tied)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS).logits
