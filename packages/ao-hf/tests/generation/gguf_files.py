"""Small models of each architecture as GGUF files, whose tensors are in all the types with super-blocks."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from torch import Tensor

from ao_core import quantize_tensor
from ao_quant.configs.gguf import gguf_spec
from ao_quant.gguf import read_gguf, write_gguf

#: rows of a K-quant are whole super-blocks of 256
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.1,
    "head_dim": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
TYPES = ("q4_k", "q6_k", "q5_k", "q3_k", "q2_k", "q8_0", "q4_0")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def words() -> list[str]:
    return ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "He"]


def tokenizer() -> dict[str, Any]:
    """The metadata of a tokenizer of bytes, with one merge."""
    tokens = words()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *(1 for _ in tokens[2:])],
        "tokenizer.ggml.merges": ["H e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def metadata(architecture: str, config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a model."""
    rope = config.rope_parameters
    sizes = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if architecture == "gemma3":
        sizes["attention.sliding_window"] = config.sliding_window
    known = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return {"general.architecture": architecture, **known, **tokenizer()}


def model_of(architecture: str, **sizes: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        KINDS[architecture], **SIZES | {"vocab_size": len(words())} | sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                torch.nn.init.normal_(parameter, std=0.1).add_(name.endswith("norm.weight"))
    return model.eval()


def write(
    path: Path,
    architecture: str = "llama",
    *,
    dense: bool = False,
    more: Any = None,
    extra: Tensor | None = None,
    **sizes: Any,
) -> Path:
    """A file of a model, its matrices in types by turns.

    `more` are keys of the metadata; None takes one away. `extra`: what llama.cpp divides frequencies by.
    """
    model = model_of(architecture, **sizes)
    types, tensors = cycle(TYPES), {}
    for name, parameter in model.named_parameters():
        spec = None if dense or parameter.dim() < 2 else gguf_spec(next(types))
        tensors[name] = parameter.detach() if spec is None else quantize_tensor(parameter, spec)
    if extra is not None:
        tensors["rope_freqs.weight"] = extra
    write_gguf(path, tensors, metadata(architecture, model.config), names="transformers")
    if more:
        tensors, keys = read_gguf(path)
        write_gguf(path, tensors, {k: v for k, v in (keys | more).items() if v is not None})
    return path
