"""Shapes of language models; sizes are those that the authors published."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ao_hf.generation.models import transformers_of_ao
from ao_hf.generation.presets.records import Preset

__all__ = ["LANGUAGE", "language"]


def language(kind: str, sizes: Mapping[str, Any]) -> Preset:
    """A causal language model of transformers.

    Args:
        kind: its `model_type`.
        sizes: fields of its configuration.
    """
    return Preset(partial(_build, kind, sizes))


def _build(kind: str, sizes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    transformers = transformers_of_ao()
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None  # random weights would stop anywhere
    return model


_LLAMA_3 = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 5e5}

LANGUAGE = {
    "llama-2-7b": language(
        "llama",
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
    ),
    "llama-3-8b": language(
        "llama", _LLAMA_3 | {"max_position_embeddings": 8192, "rope_parameters": _ROPE}
    ),
    "llama-3.1-8b": language(
        "llama",
        _LLAMA_3
        | {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-3.2-1b": language(
        "llama",
        _LLAMA_3
        | {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
            "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_parameters": _ROPE,
        },
    ),
    "mixtral-8x7b": language(
        "mixtral",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
            "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
        },
    ),
}  # fmt: skip
