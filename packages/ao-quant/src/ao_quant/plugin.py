"""What ao-quant adds to ao: its number formats, transforms and recipes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ao_core import (
    Algorithm,
    DType,
    Layout,
    ModelTransform,
    Op,
    Recipe,
    Transform,
    hookimpl,
)
from ao_core.ext.interchange import Interchange
from ao_quant.algorithms.records import ALGORITHMS as SOLVING
from ao_quant.algorithms.records import MODEL_TRANSFORMS
from ao_quant.calibration.algorithms import ALGORITHMS
from ao_quant.dtypes import DTYPES
from ao_quant.interchange.records import INTERCHANGE
from ao_quant.recipes import RECIPES
from ao_quant.transforms import TRANSFORMS
from ao_quant.trellis.layout import TRELLIS
from ao_quant.trellis.op import OPS

if TYPE_CHECKING:
    import typer

__all__ = [
    "ao_algorithms",
    "ao_api",
    "ao_cli",
    "ao_dtypes",
    "ao_interchange",
    "ao_layouts",
    "ao_model_transforms",
    "ao_ops",
    "ao_recipes",
    "ao_transforms",
]


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of the hooks that this package was written for."""
    return (0, 1)


@hookimpl
def ao_dtypes() -> Iterable[DType]:
    """Codebooks of 1 to 8 bits, and the LUT of iq4_nl."""
    return DTYPES


@hookimpl
def ao_cli(app: typer.Typer) -> None:
    """`ao convert` and `ao diff`."""
    from ao_quant.interchange.command import convert, diff

    app.command()(convert)
    app.command()(diff)


@hookimpl
def ao_interchange() -> Iterable[Interchange]:
    """Checkpoints of other projects."""
    return INTERCHANGE


@hookimpl
def ao_layouts() -> Iterable[Layout]:
    """Weights on a trellis."""
    return (TRELLIS,)


@hookimpl
def ao_ops() -> Iterable[Op]:
    """The search for codes on a trellis."""
    return OPS


@hookimpl
def ao_transforms() -> Iterable[Transform]:
    """One transform per configuration."""
    return TRANSFORMS


@hookimpl
def ao_algorithms() -> Iterable[Algorithm]:
    """Static scales of activations, GPTQ, scales by importance, clipped ranges."""
    return (*ALGORITHMS, *SOLVING)


@hookimpl
def ao_model_transforms() -> Iterable[ModelTransform]:
    """AWQ, SmoothQuant, cross-layer equalization, rotations."""
    return MODEL_TRANSFORMS


@hookimpl
def ao_recipes() -> Iterable[Recipe]:
    """The default of each configuration, and variants."""
    return RECIPES
