"""Specs and shapes on which layouts, kernels and transforms are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.numerics import dequantize_affine, quantize_affine
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, WHOLE, Spec
from ao_core.tensor import QTensor, fake_quantize, quantize_tensor
from ao_core.tensor.activations import static_qparams, static_qparams_of_range
from ao_core.tensor.codec import scale_values, zero_values
from ao_core.tensor.step_matmuls import without_steps
from ao_core.testing.base import gaussian
from ao_core.testing.input_steps import step_matrix, step_values

__all__ = [
    "SHAPES",
    "SPECS",
    "Sample",
    "activations",
    "fitting_specs",
    "held_codes",
    "holds",
    "quantized",
]

#: one format of every kind, scale and zero point, in blocks over one, all and several dimensions
SPECS: tuple[Spec, ...] = (
    Spec("int8", (1, WHOLE)),
    Spec("int4", (1, 32), scale_dtype="bfloat16"),
    Spec("uint4", (1, 16), scale_dtype="bfloat16", zero_point="int"),
    Spec("int3", (8,), scale_dtype="float16", zero_point="float"),
    Spec("f8e4m3", (WHOLE, WHOLE)),
    Spec("f4e2m1", (1, 32), scale_dtype="e8m0"),
    Spec("nf4", (1, 64), scale_dtype=Spec("int8", (4, WHOLE))),
    Spec("int6", (4, 8)),
    Spec("ternary", (1, 24)),
    Spec("uint5", (1, 16), Spec("uint6", (1, 4), "float16", layout="packed"), zero_point="offset"),
    Spec("bf16", (1, WHOLE), NO_SCALE),
    # the same for layouts that count blocks over the flattened tensor
    Spec("int8", (32,)),
    Spec("nf4", (64,)),
    Spec("f8e4m3", (WHOLE,)),
    # activations by a static scale and zero point: parts beside those of any layout
    Spec(
        "uint4",
        (16,),
        zero_point="int",
        act=Spec("uint8", (WHOLE, WHOLE), zero_point="int", static=True),
    ),
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
    """The specs, in this layout, that it can hold for a tensor of this shape; one per number format."""
    found: dict[tuple[str, Spec | None], Spec] = {}
    for spec in specs:
        if holds(layout, shape, spec):
            found.setdefault((spec.dtype, spec.act), spec.in_layout(layout.name))
    return list(found.values())


def holds(layout: Layout, shape: tuple[int, ...], spec: Spec) -> bool:
    """Whether a layout, and the canonical one that it converts to, can hold a tensor in this format."""
    fmt = registry.dtypes.get(spec.dtype)
    canonical = registry.layouts.get(layout.canonical_of(spec.in_layout(layout.name), fmt))
    return all(
        each.refuses(spec.in_layout(each.name), shape, fmt) is None for each in (layout, canonical)
    )


def held_codes(
    layout: Layout, codes: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: Spec
) -> Tensor:
    """Any codes, of the blocked shape, with those of zero in place of what a canonical layout cannot hold."""
    fmt, is_offset = registry.dtypes.get(spec.dtype), spec.zero_point == "offset"
    qparams = scale_values(scale), zero_values(zero_point)
    values = dequantize_affine(codes, fmt, spec.block, *qparams, is_offset=is_offset)
    held = layout.sparsify(values, spec)
    zeros = quantize_affine(
        torch.zeros_like(values), fmt, spec.block, *qparams, is_offset=is_offset
    )
    return torch.where(held.view(torch.int32) == values.view(torch.int32), codes, zeros)


def quantized(x: Tensor, spec: Spec) -> QTensor:
    """Values in a format, with `step_values` for its input steps.

    Static scales of activations fit Gaussian ones, of which few are clipped.
    """
    steps: dict[str, Any] = step_values(spec, tuple(x.shape))
    if spec.act is None or not spec.act.is_static:
        return quantize_tensor(x, spec, **steps)
    low, high = torch.tensor(-3.0), torch.tensor(3.5)
    scale, zero_point = static_qparams_of_range(low, high, spec.act)
    return quantize_tensor(x, spec, act_scale=scale, act_zero_point=zero_point, **steps)


def activations(x: Tensor, w: QTensor, expert: int | None = None) -> Tensor:
    """The values (float64) that activations are multiplied as by the logical weight, or that of an expert."""
    if w.spec.input:
        # what the stored weight is multiplied by, and what that is to the logical one
        matrix, stored = step_matrix(w, expert), without_steps(w, len(w.spec.input))
        values = activations((x.double() @ matrix.t()).to(x.dtype), stored)
        out: Tensor = values @ torch.linalg.inv(matrix).t()
        return out
    if w.spec.act is None:
        return x.double()
    matrix = x.float().reshape(-1, x.shape[-1])
    # a row with a NaN is lost, and no other by it, whatever scale they share
    values = torch.full_like(matrix, torch.nan)
    finite = matrix.isfinite().all(-1)
    values[finite] = fake_quantize(matrix[finite], w.spec.act, *static_qparams(w))
    return values.double().reshape(x.shape)


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
        return quantized(self.dense(seed, dtype, device), self.spec)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.spec}"
