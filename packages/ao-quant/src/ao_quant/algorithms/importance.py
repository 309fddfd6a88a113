"""Scales of least weighted squared error: an importance matrix for any format with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import DType, Spec
from ao_core.ext.numerics import (
    block_minmax,
    block_sum,
    choose_qparams,
    dequantize_affine,
    qparams_of_range,
    quant_max_of,
    quantize_affine,
)

__all__ = ["SCALED", "weighted_qparams"]

#: kinds of number formats whose values a scale multiplies
SCALED = ("int", "float", "lut")
#: the range of a block is shrunk or widened by these factors
_FACTORS = tuple(1.1 - 0.03 * k for k in range(24))


def weighted_qparams(
    x: Tensor, importance: Tensor, dtype: DType, spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the least Σ importance · error² of each block, among shrunk ranges.

    The range of all, which `choose_qparams` covers, is among them, so no block is worse than that.

    Args:
        x: of the layout's blocked shape.
        importance: of each element, in a shape that broadcasts to that of x.
        dtype: the number format, of a kind in `SCALED`.
        spec: block, storage of scales, kind of zero points and options are used.

    Returns:
        As `choose_qparams`.
    """
    x, importance = x.detach().float(), importance.float()
    mode, name = str(spec.option("mx_mode", "floor")), spec.chosen_scale_dtype
    is_offset = spec.zero_point == "offset"
    best = choose_qparams(x, dtype, spec.block, spec.zero_point, name, mx_mode=mode)

    def error(found: tuple[Tensor, Tensor | None]) -> Tensor:
        scale, zero_point = found
        codes = quantize_affine(x, dtype, spec.block, scale, zero_point, is_offset=is_offset)
        values = dequantize_affine(codes, dtype, spec.block, scale, zero_point, is_offset=is_offset)
        return block_sum(values.sub_(x).square_().mul_(importance), spec.block)

    least, quant_max = error(best), quant_max_of(dtype, spec.block)
    low, high = block_minmax(x, spec.block)
    for factor in _FACTORS:
        found = qparams_of_range(
            low * factor,
            high * factor,
            dtype,
            spec.zero_point,
            name,
            mx_mode=mode,
            quant_max=quant_max,
        )
        new = error(found)
        better = new < least
        least = torch.where(better, new, least)
        zero_point = None if best[1] is None else torch.where(better, found[1], best[1])  # type: ignore[arg-type]
        best = _where(better, found[0], best[0]), zero_point
    return best


def _where(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`torch.where` of scales, of which those of 8 bits are compared as numbers."""
    if old.dtype.itemsize > 1:
        return torch.where(better, new, old)
    return torch.where(better, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
