"""Copies of a model in which some tensors are others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn

from ao_core.errors import GraphError

__all__ = ["copied", "names_of", "selecting", "sharing", "tensors_of"]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by the first of its names."""
    return {names[0]: tensor for tensor, names in _owners(model).values()}


def names_of(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    return {name: names[0] for _, names in _owners(model).values() for name in names}


def _owners(model: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return found


def copied(model: nn.Module, others: Mapping[str, Tensor]) -> nn.Module:
    """A deep copy that has, where a name is in `others`, that tensor; what was tied stays tied.

    Raises:
        GraphError: the model cannot be copied.
    """
    tensors = tensors_of(model)
    memo = {id(tensors[name]): other for name, other in others.items()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise GraphError(f"the model cannot be copied: {type(error).__name__}: {error}") from error


def sharing(model: nn.Module, others: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy in evaluation mode that shares all other parameters with the model.

    Buffers are copied: a model may write into them when it is called.
    """
    parameters = {n: t for n, t in tensors_of(model).items() if isinstance(t, nn.Parameter)}
    return copied(model, {**parameters, **(others or {})}).eval()


def selecting(model: nn.Module, select: Callable[[Any], Any] | None) -> nn.Module:
    """The module itself (give it a copy), whose calls from now on give `select` of their outputs."""
    if select is not None:
        forward = model.forward

        @wraps(forward)
        def selected(*args: Any, **kwargs: Any) -> Any:
            return select(forward(*args, **kwargs))

        model.forward = selected
    return model
