"""The reference of the op `learned_gradients`."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.numerics import block_sum, split_blocks
from ao_core.registry import registry
from ao_core.spec import Spec

__all__ = ["learned_gradients_reference"]


def learned_gradients_reference(
    x: Tensor, grad: Tensor, scale: Tensor, zero_point: Tensor | None, reach: float, spec: Spec
) -> tuple[Tensor, Tensor]:
    """In views of blocks, so that no scale is repeated."""
    dtype = registry.dtypes.get(spec.dtype)
    view, each = split_blocks(x.to(torch.float32), spec.block, scale)
    place = view / each
    if zero_point is not None:
        place = place + split_blocks(x, spec.block, zero_point)[1]
    if dtype.kind == "int":  # what encode and decode give, in a quarter of the time
        values = place.round().clamp(dtype.min, dtype.max)
    else:
        values = dtype.decode(dtype.encode(place))
    outside = (place < dtype.min - reach) | (place > dtype.max + reach)
    by_block = grad.reshape(place.shape)
    lost = by_block.masked_fill(~outside, 0.0).to(torch.float32)
    moved = (values - place.masked_fill(outside, 0.0)) * by_block
    sums = [block_sum(part.reshape(x.shape), spec.block) for part in (moved, lost)]
    return by_block.masked_fill(outside, 0.0).reshape(x.shape), torch.stack(sums)
