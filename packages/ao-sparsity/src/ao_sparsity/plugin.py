"""The records that ao-sparsity adds to the registry of ao-core."""

from __future__ import annotations

from collections.abc import Iterable

from ao_core import Kernel, Layout, Op, Recipe, Transform, hookimpl
from ao_sparsity.kernels import KERNELS
from ao_sparsity.layouts import LAYOUTS
from ao_sparsity.recipes import RECIPES
from ao_sparsity.train.kernels import KERNELS as TRAINING_KERNELS
from ao_sparsity.train.kernels import OPS
from ao_sparsity.transforms import TRANSFORMS

__all__ = ["ao_api", "ao_kernels", "ao_layouts", "ao_ops", "ao_recipes", "ao_transforms"]


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)


@hookimpl
def ao_layouts() -> Iterable[Layout]:
    """Layouts that do not store zeros."""
    return LAYOUTS


@hookimpl
def ao_ops() -> Iterable[Op]:
    """Masks and matmuls of 2:4 training."""
    return OPS


@hookimpl
def ao_kernels() -> Iterable[Kernel]:
    """Matmuls that torch has for 2:4 weights, and for 2:4 training."""
    return (*KERNELS, *TRAINING_KERNELS)


@hookimpl
def ao_transforms() -> Iterable[Transform]:
    """One transform per configuration."""
    return TRANSFORMS


@hookimpl
def ao_recipes() -> Iterable[Recipe]:
    """The default of each configuration that works for weights without a pattern."""
    return RECIPES
