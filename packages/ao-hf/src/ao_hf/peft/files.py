"""Adapters that were computed, not trained, as files that PEFT loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from ao_core.ext import ConfigError

__all__ = ["Factors", "save_adapter"]


class Factors(Protocol):
    """B (out, rank) and A (rank, in), whose product is added to a weight."""

    @property
    def b(self) -> Tensor:
        """(out, rank)."""

    @property
    def a(self) -> Tensor:
        """(rank, in)."""


def save_adapter(
    folder: str | PathLike[str], corrections: Mapping[str, Factors], base_model: str = ""
) -> None:
    """Write a LoRA adapter, `adapter_model.safetensors` and `adapter_config.json`.

    ``peft.PeftModel.from_pretrained(model, folder)`` adds it to the quantized model.

    Args:
        folder: is made where it does not exist.
        corrections: by the names of weights, such as ``low_rank_corrections`` of ao-quant gives them; all of
            one rank.
        base_model: name or folder of the model that they belong to, for the file.

    Raises:
        ConfigError: there are none, or they differ in rank, or a name is not that of a layer's weight.
    """
    ranks = {each.a.shape[0] for each in corrections.values()}
    if len(ranks) != 1:
        found = f"ranks {sorted(ranks)}" if ranks else "no corrections"
        raise ConfigError(f"corrections has {found}; an adapter has one rank for all of its layers")
    layers = {name.removesuffix(".weight"): each for name, each in corrections.items()}
    if wrong := [name for name in corrections if not name.endswith(".weight")]:
        raise ConfigError(f"corrections has {wrong[0]!r}; adapters belong to the weight of a layer")
    tensors = {}
    for layer, each in layers.items():
        for part, value in (("lora_A", each.a), ("lora_B", each.b)):
            tensors[f"base_model.model.{layer}.{part}.weight"] = value.detach().cpu().contiguous()
    rank = ranks.pop()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model or None,
        "r": rank,
        "lora_alpha": rank,  # a factor of 1
        "target_modules": list(layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "adapter_model.safetensors", {"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (place / "adapter_config.json").write_text(text, encoding="utf-8")
