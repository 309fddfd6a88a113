"""Linear layers of a model by name to those of sparse training, and back."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_core.ext import ConfigError, checked, checked_but, shown
from ao_core.ext.kernels import is_sharded
from ao_core.ext.quantizing import warn_if_emulated
from ao_sparsity.train.kernels import is_emulated
from ao_sparsity.train.linear import SemiSparseActivationLinear, SemiSparseLinear, SparseLinear

__all__ = [
    "squash_masks",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
]

#: a class, or one with options: ``partial(SemiSparseLinear, decay=2e-4)``
Choice = type[SparseLinear] | partial[SparseLinear]


@checked_but("config")
def swap_linear_with_semi_sparse_linear(model: nn.Module, config: Mapping[str, Choice]) -> None:
    """Make linear layers of a model learn to be sparse, in place.

    Modules and parameters stay the objects they are, so an optimizer and its state go on with them; keys
    of the state dict stay too, but for what `SupermaskLinear` adds. Layers that are of the class
    already get the options anew.

    Args:
        model: any module.
        config: name of a layer -> `SemiSparseLinear`, `SemiSparseActivationLinear`, `SupermaskLinear` or
            another `SparseLinear`; with options as ``partial(SemiSparseLinear, decay=2e-4)``.

    Raises:
        ConfigError: a name that the model does not have, a layer that is not a plain `nn.Linear` or of
            another of these classes, a value that is none of them, or options that cannot work. The
            model is as it was then.

    Warns:
        EmulationWarning: 2:4 matmuls of some layers are emulated, so training will be slower.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config={shown(config)}: give a class such as SemiSparseLinear by names of layers"
        )
    chosen: dict[nn.Module, tuple[type[SparseLinear], dict[str, Any]]] = {}
    for fqn, choice in config.items():
        layer = _module(model, fqn)
        cls, options = _class_of(choice, fqn)
        try:
            cls.check(layer, **options)
        except ConfigError as error:
            raise ConfigError(f"{fqn!r} cannot become a {cls.__name__}: {error}") from error
        _needs_call(model, fqn)
        if chosen.setdefault(layer, (cls, options)) != (cls, options):
            raise ConfigError(f"{fqn!r} is a layer that another name gives another class")
    for layer, (cls, options) in chosen.items():
        assert isinstance(layer, nn.Linear)
        cls.from_dense(layer, **options)
    _warn_of_emulation([layer for layer in chosen if isinstance(layer, SemiSparseLinear)])


def _warn_of_emulation(layers: list[SemiSparseLinear]) -> None:
    weights = [layer.weight for layer in layers if not layer.weight.is_meta]
    warn_if_emulated(
        [weight for weight in weights if is_emulated(weight)],
        "matmuls of 2:4 weights are emulated",
        "Sparse matmuls need an NVIDIA GPU of compute capability 8.0 or later, cuSPARSELt, weights in "
        "bfloat16 or float16, and sizes that are multiples of 16.",
    )


@checked
def swap_semi_sparse_linear_with_linear(model: nn.Module) -> None:
    """Make all layers of sparse training plain `nn.Linear`s again, in place, with all their weights.

    Parameters stay the objects they are, but for the scores of `SupermaskLinear`, which go. To keep the
    zeros use `squash_masks`.

    Raises:
        ConfigError: `fully_shard` changed a layer's class too. The model is as it was then.
    """
    layers = _sparse_layers(model)
    for fqn, layer in layers.items():
        _check_dense(fqn, layer)
    for layer in layers.values():
        layer.to_dense()


@checked
@torch.no_grad()
def squash_masks(model: nn.Module) -> dict[str, float]:
    """Make the zeros of sparse training permanent: plain `nn.Linear`s that compute the same.

    `sparsify_` then stores them smaller, e.g. by `semi_sparse_weight` or `block_sparse_weight`. Layers
    that make their input sparse have no zeros to keep and stay what they are.

    Returns:
        Name of each layer -> the share of its weights that is zero.

    Raises:
        ConfigError: a weight is sharded, or `fully_shard` changed a layer's class. The model is as it
            was then.
    """
    layers = {
        fqn: layer
        for fqn, layer in _sparse_layers(model).items()
        if not isinstance(layer, SemiSparseActivationLinear)
    }
    for fqn, layer in layers.items():
        _check_dense(fqn, layer)
        if is_sharded(layer.weight):
            raise ConfigError(
                f"{fqn!r} is sharded, and tiles and blocks cross shards; gather it first"
            )
    shares = {}
    for fqn, layer in layers.items():
        layer.weight.copy_(layer.effective_weight())
        layer.to_dense()
        shares[fqn] = float((layer.weight == 0).float().mean())
    return shares


def _sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    return {fqn: m for fqn, m in model.named_modules() if isinstance(m, SparseLinear)}


def _module(model: nn.Module, fqn: str) -> nn.Module:
    """A module by its name; a linear layer of a similar name is named where there is none."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if fqn in modules:
        return modules[fqn]
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    close = get_close_matches(fqn, linear, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"its linear layers: {', '.join(linear[:5])}"
    raise ConfigError(f"the model has no module {fqn!r}; {hint}")


def _class_of(choice: Any, fqn: str) -> tuple[type[SparseLinear], dict[str, Any]]:
    is_partial = isinstance(choice, partial) and not choice.args
    cls, options = (choice.func, choice.keywords) if is_partial else (choice, {})
    if not (isinstance(cls, type) and issubclass(cls, SparseLinear)):
        raise ConfigError(
            f"config[{fqn!r}]={choice!r} is not a layer of sparse training; use SemiSparseLinear, "
            "SemiSparseActivationLinear or SupermaskLinear, or functools.partial of one with options"
        )
    return cls, options


def _needs_call(model: nn.Module, fqn: str) -> None:
    """Raise where torch may read the weight of a layer without calling it."""
    owner = _module(model, fqn.rpartition(".")[0])
    if isinstance(owner, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        raise ConfigError(
            f"{fqn!r} belongs to an nn.TransformerEncoderLayer, which in evaluation reads its weights "
            "past the layer and would ignore what is sparse; first call "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )


def _check_dense(fqn: str, layer: SparseLinear) -> None:
    try:
        layer.check_dense()
    except ConfigError as error:
        raise ConfigError(f"{fqn!r} cannot become an nn.Linear again: {error}") from error
