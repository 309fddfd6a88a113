"""One small Llama with a linear layer for each recipe, taken through transformers and files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ao_core import Config, FqnToConfig, QTensor, open_checkpoint, quantize_
from ao_core.ext import registry
from ao_hf import AoConfig
from ao_quant import NF4WeightOnlyConfig, quantize_checkpoint

__all__ = ["COLUMNS", "configurations", "tried"]

#: what is tried, in order
COLUMNS = ("on the fly", "save → load", "save again", "ao quantize")
_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def configurations() -> dict[str, Config]:
    """Each recipe, and each transform without one, that stores a weight in other memory."""
    registry.load_plugins()
    found = {name: registry.recipes.get(name).config for name in registry.recipes.names()}
    for name in registry.transforms.names():
        transform = registry.transforms.get(name)
        found.setdefault(name, transform.example or transform.config_type())
    found["nf4_weight_only without double quantization"] = NF4WeightOnlyConfig(double_quant=False)
    return {name: found[name] for name in sorted(found) if _stores(found[name])}


def _stores(config: Config) -> bool:
    linear = nn.Linear(48, 80)
    quantize_(linear, config)
    return isinstance(linear.weight, QTensor)


def tried(folder: Path) -> dict[str, dict[str, str]]:
    """What came of each column for each recipe: "yes", or what was found."""
    configs = configurations()
    layers = math.ceil(len(configs) / len(_LINEARS))
    sizes = {
        "vocab_size": 40, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    dense.save_pretrained(folder / "dense")
    every = (f"model.layers.{layer}.{name}" for layer in range(layers) for name in _LINEARS)
    places = dict(zip(configs, every, strict=False))
    config = FqnToConfig({places[recipe]: configs[recipe] for recipe in configs})

    fly = LlamaForCausalLM.from_pretrained(folder / "dense", quantization_config=AoConfig(config))
    quantize_(dense, config)
    fly.save_pretrained(folder / "fly", max_shard_size="50KB")
    again = LlamaForCausalLM.from_pretrained(folder / "fly")
    again.save_pretrained(folder / "again", max_shard_size="50KB")
    quantize_checkpoint(folder / "dense", folder / "files", config)
    files = LlamaForCausalLM.from_pretrained(folder / "files")

    first, second = (open_checkpoint(folder / name) for name in ("fly", "again"))
    found: dict[str, dict[str, str]] = {}
    for recipe, place in places.items():
        layer, name = fly.get_submodule(place), f"{place}.weight"
        same = first.entries[name] == second.entries[name] and all(
            torch.equal(first.read(leaf).view(torch.uint8), second.read(leaf).view(torch.uint8))
            for leaf in first.entries[name].leaves
        )
        found[recipe] = {
            "on the fly": _compared(layer, dense.get_submodule(place)),
            "save → load": _compared(again.get_submodule(place), layer),
            "save again": "yes" if same else "other bytes",
            "ao quantize": _compared(files.get_submodule(place), layer),
        }
    return found


def _compared(made: nn.Module, expected: nn.Module) -> str:
    """Whether the weights have one format, equal parts and equal products."""
    if not isinstance(made.weight, QTensor) or not isinstance(expected.weight, QTensor):
        return "nothing was quantized"
    if made.weight.spec != expected.weight.spec:
        return f"{made.weight.spec}, not {expected.weight.spec}"
    if not all(map(torch.equal, _bytes(made.weight), _bytes(expected.weight))):
        return "other parts"
    x = torch.randn(3, made.weight.shape[1], generator=torch.Generator().manual_seed(0))
    return "yes" if torch.equal(made(x), expected(x)) else "other products"


def _bytes(weight: Any) -> Iterator[torch.Tensor]:
    return (leaf.reshape(-1).view(torch.uint8) for _, leaf in weight.leaves())
