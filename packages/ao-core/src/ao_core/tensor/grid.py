"""The values that a quantized tensor can take while its scales and zero points stay: a grid per element.

Algorithms that round weights one after the other (GPTQ, learned rounding) choose codes on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Layout, scale_values, zero_values
from ao_core.numerics import dequantize_affine, expand, grid_shape, quantize_affine
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.input_steps import stored_spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import to_layout

__all__ = ["Grid", "grid_of", "regridded"]


@dataclass(frozen=True)
class Grid:
    """A number format, and the scale and zero point of each element.

    Attributes:
        dtype: the number format.
        shape: of the codes in memory, whose blocks `block` is about.
        block: extents of a block along the last dimensions, as in a `Spec`.
        block_of: the number of the block that each element is in, int32, of the stored shape.
        scale: one per block, float32, 0 where it was rounded to that; of a learned codebook (blocks, values);
            None where there is none.
        zero_point: one per block, as it is stored, or None.
        is_offset: whether the zero point is subtracted after scaling.
    """

    dtype: DType
    shape: tuple[int, ...]
    block: tuple[int, ...]
    block_of: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    is_offset: bool

    def nearest(self, x: Tensor, block_of: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of the nearest values to `x`, and these values in float32.

        Args:
            x: any floating-point numbers; compared in float32, as the reference kernel does.
            block_of: the blocks that they are in, in the same shape: a part of `self.block_of`.
        """
        scale = None if self.scale is None else self.scale[block_of]
        zero = None if self.zero_point is None else self.zero_point[block_of]
        alone, offset = (1,) * x.dim(), self.is_offset  # each element is a block
        by = None if scale is None else torch.where(scale == 0, torch.inf, scale)
        if self.dtype.kind == "codebook":
            by = scale  # values, of which one may be 0
        codes = quantize_affine(x.float(), self.dtype, alone, by, zero, is_offset=offset)
        return codes, dequantize_affine(codes, self.dtype, alone, scale, zero, is_offset=offset)


def grid_of(q: QTensor) -> Grid:
    """The grid of a tensor in its stored order, over its stored (stepped) values.

    Raises:
        UnsupportedOp: its layout holds only some of the elements, or it is permuted.
    """
    _, spec, (codes, scale, zero_point) = _unpacked(q)
    dtype, shape = registry.dtypes.get(spec.dtype), tuple(codes.shape)
    counts = grid_shape(shape, spec.block)
    numbers = torch.arange(prod(counts), dtype=torch.int32, device=codes.device)
    block_of = expand(numbers.view(counts), shape, spec.block).expand(shape)
    by, point = scale_values(scale), zero_values(zero_point)
    if by is not None:
        by = by.float().reshape(-1, *by.shape[len(counts) :])  # codebooks have a dimension more
    return Grid(
        dtype,
        shape,
        spec.block,
        block_of.reshape(q.stored_shape),
        by,
        None if point is None else point.reshape(-1),
        spec.zero_point == "offset",
    )


def regridded(
    q: QTensor, codes: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> QTensor:
    """The same tensor with other codes; input steps stay, and scales and zero points unless they are given.

    Args:
        q: in its stored order.
        codes: of the stored shape, as `Grid.nearest` gives them.
        scale: one per block, in the dtype in which they are stored.
        zero_point: the same.
    """
    layout, spec, (old, old_scale, old_point) = _unpacked(q)
    scale = old_scale if scale is None else _in_place_of(old_scale, scale)
    zero_point = old_point if zero_point is None else _in_place_of(old_point, zero_point)
    dtype = registry.dtypes.get(spec.dtype)
    new = layout.pack(codes.to(old.dtype).reshape(old.shape), scale, zero_point, spec, dtype)
    base = q.canonical()
    return to_layout(base.like({**base.parts, **new}), q.spec.layout)


def _in_place_of(old: Tensor | None, new: Tensor) -> Tensor:
    if old is None or isinstance(old, QTensor) or old.dtype != new.dtype:
        found = "none" if old is None else f"a {type(old).__name__} in {old.dtype}"
        raise UnsupportedOp(f"scales or zero points in {new.dtype} cannot replace {found}")
    return new.reshape(old.shape)


def _unpacked(q: QTensor) -> tuple[Layout, Spec, tuple[Tensor, Tensor | None, Tensor | None]]:
    """The canonical layout, the format in it, and the codes, scale and zero point as stored."""
    if q.is_permuted:
        raise UnsupportedOp("the grid of a tensor is in its stored order; transpose it first")
    base = q.canonical()
    layout, spec = base.layout_record, stored_spec(base.spec)
    if type(layout).sparsify is not Layout.sparsify:
        raise UnsupportedOp(f"{q.spec}: the layout {layout.name!r} does not hold all elements")
    dtype = registry.dtypes.get(spec.dtype)
    return layout, spec, layout.unpack(base.parts, spec, base.stored_shape, dtype)
