"""Rotation sites: where an orthogonal matrix and its inverse cancel inside of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ao_core.errors import ConfigError, GraphError
from ao_core.graph.scales import ScaledDimension, ScaleGroup, factors_of
from ao_core.mapped import spilled

__all__ = [
    "Fold",
    "OnlineSite",
    "RotatedDimension",
    "RotationSite",
    "folded",
    "keeping_mean",
    "rotated",
    "rotated_online",
]


@dataclass(frozen=True)
class RotatedDimension:
    """A dimension of a parameter or buffer along which a site rotates."""

    #: its name
    parameter: str
    #: which of its dimensions
    dim: int
    #: indices of the dimension, one row for each copy of the site's channels, as the heads of a
    #: projection: (copies, size), int64
    indices: Tensor = field(repr=False, compare=False)


@dataclass(frozen=True)
class Fold:
    """A norm whose weight has to move into what reads the norm before a rotation can go through it."""

    #: the weight of the norm
    parameter: str
    #: the scale group that moves it
    group: ScaleGroup


@dataclass(frozen=True)
class RotationSite:
    """Channels x that may be x·R for any orthogonal R, with all parameters that write or read them.

    With `keeps_mean` a LayerNorm subtracts the mean of the channels; R then has to map the vector of ones
    to itself (see `keeping_mean`), under which LayerNorm is as equivariant as RMSNorm is under any R.
    """

    #: the first parameter that writes the channels
    name: str
    #: number of channels that are rotated together
    size: int
    #: "residual": a stream that is added to; "heads": the same R in each head; "hidden": other channels
    kind: str
    #: rows of weights, biases, embeddings
    writers: tuple[RotatedDimension, ...]
    #: columns of weights
    readers: tuple[RotatedDimension, ...]
    folds: tuple[Fold, ...]
    keeps_mean: bool


@dataclass(frozen=True)
class OnlineSite:
    """The input of a product that no parameter can rotate: x·R has to be computed while the model runs."""

    #: the weight that reads the input, as "model.layers.0.mlp.down_proj.weight"
    parameter: str
    #: its dimension that is summed over
    dim: int
    size: int
    #: the module whose input is rotated
    module: str


def keeping_mean(rotation: Tensor) -> Tensor:
    """An orthogonal matrix of size n + 1 that maps the vector of ones to itself, from one of size n.

    H·diag(1, Q)·H with the Householder reflection H that exchanges the first axis and (1, …, 1)/√n.
    """
    size = rotation.shape[0] + 1
    first = torch.zeros(size, dtype=torch.float64, device=rotation.device)
    first[0] = 1
    ones = torch.full_like(first, size**-0.5)
    normal = (first - ones) / (first - ones).norm() if size > 1 else torch.zeros_like(first)
    mirror = torch.eye(size).to(first) - 2 * normal.outer(normal)
    middle = torch.block_diag(first[:1].reshape(1, 1), rotation.double())
    found: Tensor = mirror @ middle @ mirror
    return found.to(rotation.dtype)


def rotated(
    tensors: Mapping[str, Tensor], site: RotationSite, rotation: Tensor
) -> dict[str, Tensor]:
    """The parameters of a site with x·R in place of x; nothing is changed in place.

    Weights of norms are folded into what reads them first, so they are 1 afterwards.

    Args:
        tensors: the model's tensors by name, as `tensors_of(model)` gives them.
        site: where to rotate.
        rotation: R, orthogonal, shape (site.size, site.size); computed with in float64.

    Returns:
        New values of the parameters in their own dtypes.

    Raises:
        ConfigError: R is of another shape, not orthogonal, or (`site.keeps_mean`) changes the mean.
        GraphError: the weight of a norm has zeros beside a bias that is not zero, so it cannot be folded.
    """
    matrix = _checked(rotation, site.size, site.name)
    drift = float((matrix.sum(1) - 1).abs().max()) if site.keeps_mean else 0.0
    if drift > 1e-6:
        raise ConfigError(
            f"rotation: a LayerNorm of {site.name} subtracts the mean of its channels, so R·1 has to be "
            f"1, but differs by {drift:.2g}; make R with keeping_mean(Q) from Q of size {site.size - 1}"
        )
    found = {
        fold.parameter: torch.ones_like(tensors[fold.parameter]) - _norm(fold).offset
        for fold in site.folds
    }
    dimensions: dict[str, list[RotatedDimension]] = {}
    for dimension in (*site.writers, *site.readers):
        dimensions.setdefault(dimension.parameter, []).append(dimension)
    read = [each.parameter for fold in site.folds for each in fold.group.dimensions]
    for name in dict.fromkeys((*read, *dimensions)):
        if name in found:
            continue
        value = tensors[name].detach().double()
        for fold in site.folds:
            value = folded(tensors, fold, name, value)
        for dimension in dimensions.get(name, ()):
            value = _along(value, dimension, matrix)
        found[name] = spilled(value.to(tensors[name].dtype))
    return found


def rotated_online(
    tensors: Mapping[str, Tensor], site: OnlineSite, rotation: Tensor
) -> dict[str, Tensor]:
    """The weight W·R of a site; the module's input x has to become x·R before each product.

    Raises:
        ConfigError: R is of another shape or not orthogonal.
    """
    matrix = _checked(rotation, site.size, site.parameter)
    whole = RotatedDimension(site.parameter, site.dim, torch.arange(site.size)[None])
    value = _along(tensors[site.parameter].detach().double(), whole, matrix)
    return {site.parameter: value.to(tensors[site.parameter].dtype)}


def _checked(rotation: Tensor, size: int, name: str) -> Tensor:
    if rotation.shape != (size, size):
        raise ConfigError(
            f"rotation: {name} has {size} channels, so R is ({size}, {size}), not {tuple(rotation.shape)}"
        )
    matrix = rotation.double()
    error = float((matrix @ matrix.T - torch.eye(size).to(matrix)).abs().max())
    if not error <= 1e-5:
        raise ConfigError(f"rotation: R·Rᵀ differs from the identity by {error:.2g} ({name})")
    return matrix


def _along(old: Tensor, dimension: RotatedDimension, matrix: Tensor) -> Tensor:
    old = old.movedim(dimension.dim, -1)
    new = old.clone()
    indices = dimension.indices.to(old.device)
    new[..., indices] = old[..., indices] @ matrix.to(old.device)
    return new.movedim(-1, dimension.dim)


def _norm(fold: Fold) -> ScaledDimension:
    (norm,) = (site for site in fold.group.producers if site.parameter == fold.parameter)
    return norm


def folded(tensors: Mapping[str, Tensor], fold: Fold, name: str, value: Tensor) -> Tensor:
    """A parameter, of which `value` has the values, with the weight of a norm moved into it.

    Raises:
        GraphError: the weight has a zero where another parameter of the norm does not.
    """
    sites = [site for site in fold.group.dimensions if site.parameter == name]
    if not sites:
        return value
    norm = _norm(fold)
    weight = tensors[fold.parameter].detach().double() + norm.offset
    scales = torch.ones(fold.group.size, dtype=torch.float64, device=weight.device)
    scales[norm.channels.to(weight.device)] = weight
    for site in sites:
        value = _moved(value, site, scales, fold.parameter)
    return value


def _moved(old: Tensor, site: ScaledDimension, scales: Tensor, norm: str) -> Tensor:
    factors = factors_of(site, scales.to(old.device))
    factors = factors.reshape([-1 if dim == site.dim else 1 for dim in range(old.ndim)])
    if site.exponent > 0:
        return (old + site.offset) * factors - site.offset
    zero = factors == 0
    if bool((zero & (old + site.offset != 0)).any()):
        raise GraphError(
            f"{norm} has a zero where {site.parameter} has none, so it cannot move into what reads it"
        )
    return torch.where(zero, old, (old + site.offset) / factors.masked_fill(zero, 1) - site.offset)


def unfoldable(group: ScaleGroup, parameter: str, others: Sequence[str]) -> str | None:
    """Why a group cannot take the weight of a norm; None: it can."""
    sites = [site for site in group.producers if site.parameter == parameter]
    if len(sites) != 1 or bool((sites[0].channels < 0).any()):
        return "only some of its channels can be scaled"
    shared = [s.parameter for s in group.dimensions if s.parameter in others and s is not sites[0]]
    return f"{shared[0]} is scaled with it" if shared else None
