"""Shapes of well-known language models, with random weights: speed and memory need no others."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, resolve_config
from ao_core.ext import UnknownNameError, repack
from ao_core.ext.quantizing import Decision, transformed
from ao_hf.decisions import decisions_of, size_of
from ao_hf.generation.models import Loaded, device_of, empty_model, transformers_of_ao

__all__ = ["PRESETS", "Preset", "find_preset", "free_memory", "random_model", "stored_bytes"]

_LLAMA_3 = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
}  # fmt: skip
#: random values that weights are filled with, over and over
_POOL = 1 << 22


@dataclass(frozen=True)
class Preset:
    """The shape of a model.

    Attributes:
        kind: `model_type` of transformers.
        sizes: fields of its configuration.
    """

    kind: str
    sizes: dict[str, Any] = field(hash=False)


#: name -> shape; sizes are those that the authors published
PRESETS = {
    "llama-2-7b": Preset(
        "llama",
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
    ),
    "llama-3-8b": Preset(
        "llama",
        _LLAMA_3
        | {
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "llama-3.1-8b": Preset(
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
    "llama-3.2-1b": Preset(
        "llama",
        _LLAMA_3
        | {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
            "tie_word_embeddings": True, "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "mixtral-8x7b": Preset(
        "mixtral",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
            "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
        },
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """The shape of that name.

    Raises:
        UnknownNameError: there is none; with a suggestion.
    """
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]


def stored_bytes(name: str, recipe: str | None = None, dtype: str = "bfloat16") -> int:
    """Bytes of the parameters of a shape in a recipe, as they would be stored; takes no memory."""
    model = _skeleton(name, dtype)
    decisions = _decisions(model, recipe)
    sizes = 0.0
    for fqn, parameter in _owned(model):
        decision = decisions.get(fqn)
        each = parameter.element_size() if decision is None else size_of(decision, parameter)
        sizes += each * parameter.numel()
    return int(sizes)


def random_model(
    name: str, recipe: str | None = None, *, device: str | None = None, dtype: str = "bfloat16"
) -> Loaded:
    """A model of a shape with random weights; quantized one by one, so that the dense model is never whole.

    Weights of one shape have the same values, each in memory of its own.

    Raises:
        UnknownNameError: there is no such preset or recipe.
    """
    place, model = device_of(device), _skeleton(name, dtype)
    decisions = _decisions(model, recipe)
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(model.dtype)
    made: dict[Any, Tensor] = {}
    for fqn, parameter in _owned(model):
        decision = decisions.get(fqn)
        config = None if decision is None else decision.config
        key = (tuple(parameter.shape), repr(config))
        if key not in made:
            made[key] = _filled(parameter, decision, pool, place)
        path, _, last = fqn.rpartition(".")
        new = torch.nn.Parameter(made[key].clone(), requires_grad=False)
        model.get_submodule(path)._parameters[last] = new
    model.tie_weights()
    return Loaded(model.to(place).eval(), None, Path(name), recipe)


def _filled(
    parameter: Tensor, decision: Decision | None, pool: Tensor, place: torch.device
) -> Tensor:
    count = parameter.numel()
    dense = pool.repeat(-(-count // len(pool)))[:count].view(parameter.shape).to(place)
    if parameter.dim() == 1:
        dense = torch.ones_like(dense)  # gains of norms
    if decision is None or decision.config is None:
        return dense
    new = transformed(decision, dense)
    return repack(new) if isinstance(new, QTensor) else dense


def _skeleton(name: str, dtype: str) -> Any:
    """The model with its parameters on the meta device, and buffers that were computed."""
    preset = find_preset(name)
    config = transformers_of_ao().AutoConfig.for_model(preset.kind, **preset.sizes)
    model = empty_model(config, getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    return model


def _owned(model: Any) -> list[tuple[str, Tensor]]:
    """The parameters, without those that will be tied to others."""
    return [(n, p) for n, p in model.named_parameters() if n not in model.all_tied_weights_keys]


def _decisions(model: Any, recipe: str | None) -> dict[str, Decision]:
    return {} if recipe is None else decisions_of(model, resolve_config(recipe), ())


def free_memory(device: str | None) -> int:
    """Bytes that a model can take there now; of a CPU those that the system says are available."""
    place = device_of(device)
    if place.type != "cpu":
        return int(torch.get_device_module(place).mem_get_info()[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return 1024 * int(text.partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
