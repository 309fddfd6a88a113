"""A model traced for removal: what pruning put beside its weights, and what its code does not let go."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ao_core.ext import GraphError
from ao_core.ext.graph import Axis, Inputs, Traced, fix, names_of, trace
from ao_sparsity.prune.keeping import SUFFIX
from ao_sparsity.remove.errors import RemovalError

__all__ = ["trace_for_removal"]

#: modules whose code fixes their sizes
_WHOLE: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "nn.MultiheadAttention needs embed_dim = num_heads × head_dim",
}


def trace_for_removal(model: nn.Module, inputs: Inputs) -> Traced:
    """The operations of a model; masks that pruning put on it have the dimensions of their weights.

    Raises:
        RemovalError: the model cannot be exported with these inputs, or not be copied.
    """
    first = names_of(model)
    masks = {name: first.get(name.removesuffix(SUFFIX)) for name in first if name.endswith(SUFFIX)}
    try:
        found = trace(model, inputs, {mask: name for mask, name in masks.items() if name})
    except GraphError as error:
        raise RemovalError(str(error)) from error
    _fix_whole(model, found.tensors, first)
    return found


def _fix_whole(model: nn.Module, tensors: dict[str, list[Axis]], first: Mapping[str, str]) -> None:
    """Leave modules as they are whose code fixes their sizes, and tensors that are no plain ones."""
    for fqn, module in model.named_modules():
        reasons = [why for kind, why in _WHOLE.items() if isinstance(module, kind)]
        for name, tensor in module.named_parameters(fqn):
            plain = type(tensor.data) in (Tensor, nn.Parameter)
            why = reasons or ([] if plain else [f"its tensors are {type(tensor.data).__name__}s"])
            for axis in tensors[first[name]] if why else ():
                fix(axis, why[0])
