"""The reference of the op `scale_sums`."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.numerics import searched_at_once
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.spec import Spec

__all__ = ["scale_sums"]


def scale_sums(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    power: float | None,
    spec: Spec,
) -> Tensor:
    """One candidate after the other, so many columns at a time."""
    dtype = registry.dtypes.get(spec.dtype)
    (rows, columns), candidates = x.shape, scale.shape[1]
    planes = 3 if power is None else 4
    width = max(2 * searched_at_once(x.device) // max(rows, 1), 1)
    adds = torch.float32 if columns <= width else torch.float64
    sums = torch.zeros(planes, rows, candidates, dtype=adds, device=x.device)
    for begin in range(0, columns, width):
        part = slice(begin, begin + width)
        strip = x[:, part].to(torch.float32)
        weights = None if importance is None else importance[:, part]
        for c in range(candidates):
            point = None if zero_point is None else zero_point[:, c : c + 1]
            error = _error(strip, dtype, scale[:, c : c + 1], point)
            _add(sums[..., c], error, strip, weights, power)
    return sums.to(torch.float32)


def _error(x: Tensor, dtype: DType, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """What dequantizing gives, less x."""
    ratio = x / torch.where(scale == 0, 1.0, scale)
    if zero_point is not None:
        ratio.add_(zero_point)
    if dtype.kind == "int":  # what encode and decode give, in a quarter of the time
        values = ratio.round_().clamp_(dtype.min, dtype.max)
    else:
        values = dtype.decode(dtype.encode(ratio))
    if zero_point is not None:
        values.sub_(zero_point)
    return values.mul_(scale).sub_(x)


def _add(
    sums: Tensor, error: Tensor, x: Tensor, weights: Tensor | None, power: float | None
) -> None:
    """Add up a strip: `sums` is (3, B), or (4, B) with a power."""
    counted = error if weights is None else error * weights
    sums[0] += (counted * error).sum(1)
    sums[1] += (counted * x).sum(1)
    sums[2] += counted.sum(1)
    if power is not None:
        powers = error.abs().pow_(power)
        sums[3] += (powers if weights is None else powers.mul_(weights)).sum(1)
