"""Scales of least weighted squared error: an importance matrix for any format with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ao_core import DType, QTensor, Spec
from ao_core.ext import quantize_values, registry
from ao_core.ext.numerics import QParams, Rows, improve_qparams, improved
from ao_core.ext.quantizing import grid_of, regridded

__all__ = ["SCALED", "weighted_nested", "weighted_qparams"]

#: kinds of number formats whose values a scale multiplies
SCALED = ("int", "float", "lut")


def weighted_nested(x: Tensor, importance: Tensor, spec: Spec) -> QTensor:
    """`x` in a format whose scales are quantized too, of least Σ importance · error² of each block.

    The scale of scales is that of the greatest elements. Each block has the scale, of those that it makes,
    of the least error.

    Args:
        x: (..., K).
        importance: of each element, not negative, in the shape of x.
        spec: the format, without a zero point.
    """
    nearest = quantize_values(x, spec)
    part = nearest.parts["scale"]
    assert isinstance(part, QTensor)
    numbers, dtype = grid_of(part), registry.dtypes.get(spec.dtype)
    assert numbers.scale is not None
    steps = numbers.scale.tolist()  # one, or one for each expert
    blocked = registry.layouts.get(spec.layout).blocked_shape(tuple(x.shape))
    values, by = (each.reshape(len(steps), *blocked[len(steps) > 1 :]) for each in (x, importance))
    scales = [
        weighted_qparams(
            each, counts, dtype, spec, stored=partial(_multiples, numbers.dtype, step)
        )[0]
        for each, counts, step in zip(values, by, steps, strict=True)
    ]
    chosen = torch.stack(scales).reshape(part.shape)
    new = regridded(part, numbers.nearest(chosen, numbers.block_of)[0])
    found = nearest.like({**nearest.parts, "scale": new})
    grid = grid_of(found)
    return regridded(found, grid.nearest(x.reshape(grid.block_of.shape), grid.block_of)[0])


def _multiples(dtype: DType, step: float, scale: Tensor) -> Tensor:
    """The nearest positive values of a format times `step`."""
    least = float(dtype.decode(torch.tensor([1], dtype=torch.uint8)))
    return dtype.decode(dtype.encode((scale / step).clamp(min=least))) * step


def weighted_qparams(
    x: Tensor,
    importance: Tensor,
    dtype: DType,
    spec: Spec,
    *,
    stored: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the least Σ importance · error² of each block.

    The best of some shrunk ranges, each end of which is moved then, and of least-squares fits to the codes
    that it gives. The range of all, which `choose_qparams` covers, is among them: no block gets worse.

    Args:
        x: of the layout's blocked shape.
        importance: of each element, not negative, in the shape of x.
        dtype: the number format, of a kind in `SCALED`.
        spec: block, storage of scales, kind of zero points and options are used.
        stored: scales -> what they will be once they are quantized too; None: they are not.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, partial(_improved, stored), importance.float())


def _improved(stored: Callable[[Tensor], Tensor] | None, rows: Rows) -> QParams:
    start = rows.start
    if stored is not None:
        start = QParams(stored(start.scale), start.zero_point)
    rows = replace(rows, start=start, gain=0.0, nested=stored)
    return improved(rows)
