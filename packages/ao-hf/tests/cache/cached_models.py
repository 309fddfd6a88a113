"""Small models with random weights, one for each way of attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 95,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 4, "layer_types": HYBRID["layer_types"] * 2, "sliding_window": 24,
    "num_kv_shared_layers": 2, "intermediate_size": [40] * 4, "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "laurel_rank": 4,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
#: name -> class of the model, class of its configuration, sizes besides
DECODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (t.LlamaForCausalLM, t.LlamaConfig, {}),
    "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config, {}),
    "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config, {}),
    "gemma2": (t.Gemma2ForCausalLM, t.Gemma2Config, {**HYBRID, "attn_logit_softcapping": 2.0}),
    "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig, HYBRID),
    "gpt_oss": (
        t.GptOssForCausalLM,
        t.GptOssConfig,
        {
            **HYBRID,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mixtral": (t.MixtralForCausalLM, t.MixtralConfig, {"num_local_experts": 4}),
    "gpt2": (
        t.GPT2LMHeadModel,
        t.GPT2Config,
        {"n_positions": 512, "n_embd": 32, "n_head": 4, "n_layer": 2},
    ),
    # keys that another layer computed, keys that are repeated after the cache, layers with a state
    "gemma3n": (t.Gemma3nForCausalLM, t.Gemma3nTextConfig, SHARED),
    "jetmoe": (t.JetMoeForCausalLM, t.JetMoeConfig, {"kv_channels": 8, "num_local_experts": 4}),
    "qwen3_next": (t.Qwen3NextForCausalLM, t.Qwen3NextConfig, LINEAR),
    "deepseek_v3": (t.DeepseekV3ForCausalLM, t.DeepseekV3Config, MLA),
}
#: what transformers uses for each by default; "sdpa" has no softcap and no sinks
EAGER = frozenset({"gemma2", "gpt_oss"})


def decoder(name: str, **changes: Any) -> Any:
    """A model in evaluation."""
    kind, config, besides = DECODERS[name]
    sizes = {**SIZES, **besides, **changes}
    if name == "gpt2":
        sizes = {
            k: sizes[k]
            for k in sizes
            if not k.startswith(("num_", "hidden", "interm", "head", "max_"))
        }
    model = kind(config(**sizes)).eval()
    model.set_attn_implementation("eager" if name in EAGER else "sdpa")
    return spread(model)


def spread(model: nn.Module) -> Any:
    """The same with weights so large that attention and likeliest tokens are not all alike."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.25)
    return model.eval()


_BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
}  # fmt: skip
_SPEECH = {
    "max_source_positions": 200, "max_target_positions": 100, "num_mel_bins": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
#: name -> class of the model, class of its configuration, sizes
SEQUENCES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "t5": (t.T5ForConditionalGeneration, t.T5Config, {
        "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "bart": (t.BartForConditionalGeneration, t.BartConfig, {
        **_BART, "max_position_embeddings": 512, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }),
    "whisper": (t.WhisperForConditionalGeneration, t.WhisperConfig, {**_BART, **_SPEECH}),
}  # fmt: skip


def sequence(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with an encoder, and what it reads."""
    kind, config, sizes = SEQUENCES[name]
    model = spread(kind(config(**sizes)))
    if name == "whisper":
        model.generation_config.max_length = None
        return model, {"input_features": torch.randn(2, 8, 400)}
    ids = torch.randint(3, 95, (2, 290))
    mask = torch.ones_like(ids)
    mask[0, 250:] = 0
    return model, {"input_ids": ids, "attention_mask": mask}


def ids(rows: int = 2, tokens: int = 300) -> torch.Tensor:
    return torch.randint(2, 95, (rows, tokens))


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    found: torch.Tensor = model(tokens, past_key_values=cache).logits
    return found
