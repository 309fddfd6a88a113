"""Ranges that clip, by the error of what each group of weights adds to the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import DType, Spec
from ao_core.ext.numerics import (
    block_minmax,
    choose_qparams,
    dequantize_affine,
    qparams_of_range,
    quant_max_of,
    quantize_affine,
)

__all__ = ["clipped_qparams"]

#: the distance of two factors that are tried
_STEP = 0.05


def clipped_qparams(
    x: Tensor, hessians: Tensor, dtype: DType, spec: Spec, least: float
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the least δ H δᵀ of each group, H being that of its columns.

    The range of all is among those that are tried, so no group is worse than with that.

    Args:
        x: (N, K) or (E, N, K).
        hessians: (E, K, K), Σ x xᵀ.
        dtype: the number format, of a kind that has scales.
        spec: one with groups along rows.
        least: the smallest factor of a range.

    Returns:
        As `choose_qparams`.
    """
    x = x.detach().float()
    mode, name = str(spec.option("mx_mode", "floor")), spec.chosen_scale_dtype
    is_offset, block = spec.zero_point == "offset", spec.block
    scale, zero_point = choose_qparams(x, dtype, block, spec.zero_point, name, mx_mode=mode)
    width = x.shape[-1] if block[-1] < 0 else block[-1]

    def error(scale: Tensor, zero_point: Tensor | None) -> Tensor:
        codes = quantize_affine(x, dtype, block, scale, zero_point, is_offset=is_offset)
        values = dequantize_affine(codes, dtype, block, scale, zero_point, is_offset=is_offset)
        return _errors(values - x, hessians, width).reshape(scale.shape)

    best = error(scale, zero_point)
    low, high = block_minmax(x, block)
    quant_max = quant_max_of(dtype, block)
    for step in range(1, round((1 - least) / _STEP) + 1):
        factor = 1 - _STEP * step
        new, zero = qparams_of_range(
            low * factor,
            high * factor,
            dtype,
            spec.zero_point,
            name,
            mx_mode=mode,
            quant_max=quant_max,
        )
        found = error(new, zero)
        better = found < best
        best = torch.where(better, found, best)
        scale = _where(better, new, scale)
        if zero_point is not None and zero is not None:
            zero_point = torch.where(better, zero, zero_point)
    return scale, zero_point


def _errors(change: Tensor, hessians: Tensor, width: int) -> Tensor:
    """(E, N, groups): δ H δᵀ of the columns of each group."""
    change = change.reshape(len(hessians), -1, change.shape[-1])
    parts = []
    for start in range(0, change.shape[-1], width):
        here = slice(start, start + width)
        delta, block = change[..., here], hessians[:, here, here].to(change.dtype)
        parts.append(((delta @ block) * delta).sum(-1))
    return torch.stack(parts, -1)


def _where(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`torch.where` of scales, of which those of 8 bits are compared as numbers."""
    if old.dtype.itemsize > 1:
        return torch.where(better, new, old)
    return torch.where(better, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
