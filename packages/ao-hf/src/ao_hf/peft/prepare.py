"""Preparing a quantized model of transformers for training adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ao_core import QTensor
from ao_core.ext import ConfigError

__all__ = ["prepare_model_for_kbit_training"]


def prepare_model_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """Freeze a model, hold norms in float32, and turn activation checkpointing on, in place.

    The function of this name in PEFT works on models of ao too, but it knows methods of quantization by
    name and turns checkpointing on for those only. It also makes every parameter float32, embeddings
    included. Here, dense parameters that are multiplied or added become float32, as there. Embeddings that
    are only looked up keep their dtype. So do quantized weights, which take activations of any dtype.

    Args:
        model: of transformers, with weights quantized by ao.
        use_gradient_checkpointing: recompute activations in the backward pass.
        gradient_checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`; by default not reentrant.

    Returns:
        The model.

    Raises:
        ConfigError: the model has no checkpointing to turn on. It stays as it was.
    """
    if use_gradient_checkpointing and not hasattr(model, "activation_checkpointing_enable"):
        raise ConfigError(
            f"use_gradient_checkpointing=True: {type(model).__name__} has no "
            "activation_checkpointing_enable, as models of transformers have; use False"
        )
    looked_up = _only_looked_up(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        if half and not isinstance(parameter, QTensor) and id(parameter) not in looked_up:
            parameter.data = parameter.data.float()
    if use_gradient_checkpointing:
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:  # which needs an input with a gradient
            model.enable_input_require_grads()  # type: ignore[operator]
        model.activation_checkpointing_enable(options)  # type: ignore[operator]
    return model


def _only_looked_up(model: nn.Module) -> set[int]:
    """Ids of the parameters of embeddings that no other module has."""
    tables: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        found = tables if isinstance(module, nn.Embedding) else others
        found.update(id(parameter) for parameter in module._parameters.values())
    return tables - others
