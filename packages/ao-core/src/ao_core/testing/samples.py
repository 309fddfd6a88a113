"""Specs and shapes on which layouts, kernels and transforms are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import QTensor, quantize_tensor
from ao_core.testing.base import gaussian

__all__ = ["SHAPES", "SPECS", "Sample", "fitting_specs", "holds"]

#: one format of every kind, scale and zero point, in blocks over one, all and several dimensions
SPECS: tuple[Spec, ...] = (
    Spec("int8", (1, WHOLE)),
    Spec("int4", (1, 32), scale_dtype="bfloat16"),
    Spec("uint4", (1, 16), scale_dtype="bfloat16", zero="int"),
    Spec("int3", (8,), scale_dtype="float16", zero="float"),
    Spec("f8e4m3", (WHOLE, WHOLE)),
    Spec("f4e2m1", (1, 32), scale_dtype="e8m0"),
    Spec("nf4", (1, 64), scale_dtype=Spec("int8", (4, WHOLE))),
    Spec("int6", (4, 8)),
    Spec("ternary", (1, 24)),
    Spec("uint5", (1, 16), Spec("uint6", (1, 4), "float16", layout="packed"), zero="scaled"),
    # the same for layouts that count blocks over the flattened tensor
    Spec("int8", (32,)),
    Spec("nf4", (64,)),
    Spec("f8e4m3", (WHOLE,)),
)

#: ragged and aligned, one to four dimensions, empty, and a single element
SHAPES: tuple[tuple[int, ...], ...] = (
    (16, 64),
    (33, 70),
    (1, 1),
    (0, 16),
    (77,),
    (3, 8, 40),
    (4, 3, 3, 2),
)


def fitting_specs(
    layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec] = SPECS
) -> list[Spec]:
    """The specs, in this layout, that it can hold for a tensor of this shape; one a number format."""
    found: dict[tuple[str, Spec | None], Spec] = {}
    for spec in specs:
        if holds(layout, shape, spec):
            found.setdefault((spec.dtype, spec.act), replace(spec, layout=layout.name))
    return list(found.values())


def holds(layout: Layout, shape: tuple[int, ...], spec: Spec) -> bool:
    """Whether a layout, and the canonical one that it converts to, can hold a tensor in this format."""
    canonical = registry.layouts.get(layout.canonical_name or layout.name)
    fmt = registry.dtypes.get(spec.dtype)
    return all(
        each.fits(replace(spec, layout=each.name), shape, fmt) is None
        for each in (layout, canonical)
    )


@dataclass(frozen=True)
class Sample:
    """A spec and a shape that its layout can hold."""

    spec: Spec
    shape: tuple[int, ...]

    def dense(
        self, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Tensor:
        """Gaussian values."""
        return gaussian(self.shape, seed=seed, device=device).to(dtype)

    def quantized(
        self, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> QTensor:
        """`dense` in the format."""
        return quantize_tensor(self.dense(seed, dtype, device), self.spec)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.spec}"
