"""What ao-float8 adds to ao: transforms and recipes for training."""

from __future__ import annotations

from collections.abc import Iterable

from ao_core import Recipe, Transform, hookimpl
from ao_float8.recipes import RECIPES
from ao_float8.transforms import TRANSFORMS

__all__ = ["ao_api", "ao_recipes", "ao_transforms"]


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of the hooks that this package was written for."""
    return (0, 1)


@hookimpl
def ao_transforms() -> Iterable[Transform]:
    """One transform for each configuration."""
    return TRANSFORMS


@hookimpl
def ao_recipes() -> Iterable[Recipe]:
    """The published recipes of float8 training, and those of other formats."""
    return RECIPES
