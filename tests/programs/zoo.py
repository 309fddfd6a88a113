"""Small random models of the libraries that people run, and example inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

__all__ = ["LANGUAGE_MODELS", "MODELS", "Sample", "language_model", "outputs"]

_WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_TEXT = {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}
_LLM = {**_WIDE, **_HEADS, **_TEXT, "head_dim": 16}
_VISION = {"image_size": 32, "patch_size": 8, "num_channels": 3, "num_attention_heads": 4, **_WIDE}


@dataclass(frozen=True)
class Sample:
    """A model class, its configuration, and inputs by name."""

    model: Any
    config: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    #: whether `generate` writes tokens with it
    writes: bool = False

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with random weights, in evaluation mode; the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.model(self.config()).to(dtype).eval()


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(1, 128, (2, 12), generator=generator)}


def _pixels(size: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def _both() -> dict[str, Tensor]:
    return {**_tokens(), "decoder_input_ids": _tokens()["input_ids"][:, :5]}


def _speech() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 16, 40, generator=generator)
    return {"input_features": features, "decoder_input_ids": _both()["decoder_input_ids"]}


def _sam() -> Any:
    encoder = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 96}
    image = {"image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1]}
    prompt = {"hidden_size": 32, "image_size": 32, "patch_size": 8, "image_embedding_size": 4}
    decoder = {"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32, "num_hidden_layers": 2}
    return tf.SamConfig(
        vision_config={**encoder, **image, "output_channels": 32, "num_pos_feats": 16},
        prompt_encoder_config={**prompt, "mask_input_channels": 4},
        mask_decoder_config={**decoder, "num_attention_heads": 4},
    )


MODELS: dict[str, Sample] = {
    "llama": Sample(tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**_LLM), _tokens, writes=True),
    "qwen3": Sample(tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**_LLM), _tokens, writes=True),
    "gemma3": Sample(
        tf.Gemma3ForCausalLM,
        lambda: tf.Gemma3TextConfig(**_LLM, sliding_window=8, tie_word_embeddings=True),
        _tokens,
        writes=True,
    ),
    "gpt2": Sample(
        tf.GPT2LMHeadModel,
        lambda: tf.GPT2Config(
            vocab_size=128,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _tokens,
        writes=True,
    ),
    "mixtral": Sample(
        tf.MixtralForCausalLM,
        lambda: tf.MixtralConfig(**_LLM, num_local_experts=4),
        _tokens,
        writes=True,
    ),
    "qwen3_moe": Sample(
        tf.Qwen3MoeForCausalLM,
        lambda: tf.Qwen3MoeConfig(
            **_LLM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
        ),
        _tokens,
        writes=True,
    ),
    "gpt_oss": Sample(
        tf.GptOssForCausalLM,
        lambda: tf.GptOssConfig(
            **_LLM, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
        ),
        _tokens,
        writes=True,
    ),
    "mamba2": Sample(
        tf.Mamba2ForCausalLM,
        lambda: tf.Mamba2Config(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=2,
            state_size=16,
            expand=2,
            head_dim=16,
            num_heads=8,
            n_groups=2,
            chunk_size=8,
            pad_token_id=0,
        ),
        _tokens,
    ),
    "bert": Sample(
        tf.BertModel, lambda: tf.BertConfig(**_WIDE, **_TEXT, num_attention_heads=4), _tokens
    ),
    "modernbert": Sample(
        tf.ModernBertModel,
        lambda: tf.ModernBertConfig(
            **_WIDE,
            **_TEXT,
            num_attention_heads=4,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        _tokens,
    ),
    "t5": Sample(
        tf.T5ForConditionalGeneration,
        lambda: tf.T5Config(
            vocab_size=128,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _both,
        writes=True,
    ),
    "whisper": Sample(
        tf.WhisperForConditionalGeneration,
        lambda: tf.WhisperConfig(
            vocab_size=128,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            num_mel_bins=16,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        _speech,
    ),
    "vit": Sample(tf.ViTModel, lambda: tf.ViTConfig(**_VISION), _pixels),
    "clip": Sample(
        tf.CLIPModel,
        lambda: tf.CLIPConfig(
            text_config={
                **_WIDE,
                **_TEXT,
                "num_attention_heads": 4,
                "eos_token_id": 2,
                "bos_token_id": 1,
            },
            vision_config=_VISION,
            projection_dim=32,
        ),
        lambda: {**_tokens(), **_pixels()},
    ),
    "sam": Sample(
        tf.SamModel,
        _sam,
        lambda: {**_pixels(), "input_points": torch.tensor([[[[4.0, 5.0]]], [[[9.0, 2.0]]]])},
    ),
}

#: models that a Trainer and PEFT are tried on
LANGUAGE_MODELS = ("llama", "mixtral")


def language_model(name: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small causal language model, ready to train."""
    return MODELS[name].build(dtype).train()


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The first output of a model that is a floating-point tensor, in float32."""
    values = model(**inputs)
    for value in values.to_tuple() if hasattr(values, "to_tuple") else tuple(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float()
    raise AssertionError("the model returned no tensor")
