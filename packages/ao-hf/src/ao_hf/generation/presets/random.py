"""Models of known shapes with random weights, and the bytes that they would take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, resolve_config
from ao_core.ext import repack
from ao_core.ext.quantizing import Decision, transformed
from ao_hf.decisions import decisions_of, size_of
from ao_hf.generation.caches import computed_bytes
from ao_hf.generation.models import Loaded, device_of, empty_model
from ao_hf.generation.presets.table import find_preset

__all__ = ["cache_bytes_of", "random_model", "skeleton", "stored_bytes"]

#: random values that weights are filled with, over and over
_POOL = 1 << 22


def skeleton(name: str, dtype: str = "bfloat16") -> Any:
    """The model with its parameters on the meta device, and buffers that were computed.

    Raises:
        UnknownNameError: there is no such preset.
        MissingExtraError: a package that the model needs is not installed.
    """
    return empty_model(partial(find_preset(name).build, getattr(torch, dtype)))


def stored_bytes(name: str, recipe: str | None = None, dtype: str = "bfloat16") -> int:
    """Bytes of the parameters of a shape in a recipe, as they would be stored; takes no memory.

    Raises:
        UnknownNameError: there is no such preset or recipe.
    """
    model = skeleton(name, dtype)
    decisions = _decisions(model, recipe)
    sizes = 0.0
    for fqn, parameter in _owned(model):
        decision = decisions.get(fqn)
        each = parameter.element_size() if decision is None else size_of(decision, parameter)
        sizes += each * parameter.numel()
    return int(sizes)


def cache_bytes_of(
    name: str, kv: str | None, rows: int, tokens: int, dtype: str = "bfloat16"
) -> int:
    """Bytes of keys and values of a language model of that shape; takes no memory."""
    return computed_bytes(skeleton(name, dtype), kv, rows, tokens)


def random_model(
    name: str, recipe: str | None = None, *, device: str | None = None, dtype: str = "bfloat16"
) -> Loaded:
    """A model of a shape with random weights; quantized one by one, so that the dense model is never whole.

    Weights of one shape have the same values, each in memory of its own.

    Raises:
        UnknownNameError: there is no such preset or recipe.
    """
    place, model = device_of(device), skeleton(name, dtype)
    decisions = _decisions(model, recipe)
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(model.dtype)
    made: dict[Any, Tensor] = {}
    for fqn, parameter in _owned(model):
        decision = decisions.get(fqn)
        config = None if decision is None else decision.config
        path, _, last = fqn.rpartition(".")
        key = (tuple(parameter.shape), repr(config), last)
        if key not in made:
            made[key] = _filled(last, parameter, decision, pool, place)
        new = torch.nn.Parameter(made[key].clone(), requires_grad=False)
        model.get_submodule(path)._parameters[last] = new
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return Loaded(model.to(place).eval(), None, Path(name), recipe)


def _filled(
    name: str, parameter: Tensor, decision: Decision | None, pool: Tensor, place: torch.device
) -> Tensor:
    if parameter.dim() == 1:  # gains of norms, and biases
        same = torch.zeros_like if name == "bias" else torch.ones_like
        return same(parameter, device=place)
    count = parameter.numel()
    dense = pool.repeat(-(-count // len(pool)))[:count].view(parameter.shape)
    dense = dense.to(place, parameter.dtype)
    if decision is None or decision.config is None:
        return dense
    new = transformed(decision, dense)
    return repack(new) if isinstance(new, QTensor) else dense


def _owned(model: Any) -> list[tuple[str, Tensor]]:
    """The parameters, without those that will be tied to others."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return [(name, p) for name, p in model.named_parameters() if name not in tied]


def _decisions(model: Any, recipe: str | None) -> dict[str, Decision]:
    return {} if recipe is None else decisions_of(model, resolve_config(recipe), ())
