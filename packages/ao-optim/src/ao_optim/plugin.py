"""The records that ao-optim adds to the registry of ao-core."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from ao_core import DType, Kernel, Layout, Op, hookimpl
from ao_optim import optimizers
from ao_optim.adam import ADAM_STEP, KERNELS
from ao_optim.dtypes import DTYPES
from ao_optim.galore import GaLore
from ao_optim.lion import LION_STEP
from ao_optim.offload import CPUOffloadOptimizer
from ao_optim.rank1 import Rank1
from ao_optim.rule import RULE_STEP

__all__ = ["ao_api", "ao_dtypes", "ao_kernels", "ao_layouts", "ao_ops", "ao_optimizers"]


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)


@hookimpl
def ao_dtypes() -> Iterable[DType]:
    """LUTs that are fine near zero."""
    return DTYPES


@hookimpl
def ao_layouts() -> Iterable[Layout]:
    """Scales from rows and columns."""
    return (Rank1(),)


@hookimpl
def ao_ops() -> Iterable[Op]:
    """The steps of Adam and Lion, and of any rule."""
    return ADAM_STEP, LION_STEP, RULE_STEP


@hookimpl
def ao_kernels() -> Iterable[Kernel]:
    """The step of Adam that torch has."""
    return KERNELS


@hookimpl
def ao_optimizers() -> Iterable[type[Optimizer]]:
    """All optimizers of the package."""
    return [
        *(getattr(optimizers, name) for name in optimizers.__all__),
        CPUOffloadOptimizer,
        GaLore,
    ]
