"""The values that a quantized tensor can take while its scales and zero points stay: a grid per element.

Algorithms that round weights one after the other (GPTQ, learned rounding) choose codes on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Layout, scale_values, zero_values
from ao_core.numerics import dequantize_affine, expand, full_block, grid_shape, quantize_affine
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.input_steps import stored_spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import to_layout

__all__ = ["Columns", "Grid", "columns_of", "grid_of", "regridded"]


@dataclass(frozen=True)
class Grid:
    """A number format, and the scale and zero point of each element.

    Attributes:
        dtype: the number format.
        block_of: the number of the block that each element is in, int32, of the stored shape.
        scale: one per block, float32, 0 where it was rounded to that; of a learned codebook (blocks, values);
            None where there is none.
        zero_point: one per block, as it is stored, or None.
        is_offset: whether the zero point is subtracted after scaling.
    """

    dtype: DType
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


@dataclass(frozen=True)
class Columns:
    """How the columns of matrices are rounded, one after the other, while scales and zero points stay.

    Attributes:
        group_of: (K,), the block of the format that each column is in, counted along a row.
        nearest: (values (N,) of a column, number of the matrix, of the column) -> its codes, and the values
            (N,) in float32 that they stand for. There are more codes than values where the layout has some
            for rows that are not there.
    """

    group_of: Tensor
    nearest: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def columns_of(q: QTensor) -> Columns:
    """How to round the columns of a tensor (..., N, K) in its stored order, of its stored (stepped) values.

    Raises:
        UnsupportedOp: its layout holds only some of the elements, or has no way to round a column alone.
    """
    columns, rows = q.stored_shape[-1], q.stored_shape[-2]
    layout, spec, (_, scale, _) = _unpacked(q)
    if layout.affine:
        grid = grid_of(q)
        blocks = grid.block_of.reshape(-1, rows, columns)

        def nearest(x: Tensor, matrix: int, column: int) -> tuple[Tensor, Tensor]:
            return grid.nearest(x, blocks[matrix, :, column])

        return Columns(blocks[0, 0], nearest)
    dtype = registry.dtypes.get(spec.dtype)
    by = scale_values(scale)
    assert by is not None
    dense = expand(by, q.stored_shape, spec.block).expand(q.stored_shape)
    dense = dense.reshape(-1, rows, columns)

    def round_column(x: Tensor, matrix: int, column: int) -> tuple[Tensor, Tensor]:
        return layout.round_column(x, dense[matrix, :, column], spec, dtype)

    numbers = torch.arange(by.shape[-1], device=by.device)
    width = full_block(spec.block, q.stored_shape)[-1]
    group_of = numbers.repeat_interleave(width)[:columns]
    return Columns(group_of, round_column)


def grid_of(q: QTensor) -> Grid:
    """The grid of a tensor in its stored order, over its stored (stepped) values.

    Raises:
        UnsupportedOp: its layout holds only some of the elements, or values that do not follow from the code
            of one element, or it is permuted.
    """
    layout, spec, (codes, scale, zero_point) = _unpacked(q)
    if not layout.affine:
        raise UnsupportedOp(
            f"{q.spec}: a value in the layout {layout.name!r} follows from more than its code; round columns by "
            "`columns_of`"
        )
    dtype, shape = registry.dtypes.get(spec.dtype), tuple(codes.shape)
    counts = grid_shape(shape, spec.block)
    numbers = torch.arange(prod(counts), dtype=torch.int32, device=codes.device)
    block_of = expand(numbers.view(counts), shape, spec.block).expand(shape)
    by, point = scale_values(scale), zero_values(zero_point)
    if by is not None:
        by = by.float().reshape(-1, *by.shape[len(counts) :])  # codebooks have a dimension more
    return Grid(
        dtype,
        block_of.reshape(q.stored_shape),
        by,
        None if point is None else point.reshape(-1),
        spec.zero_point == "offset",
    )


def regridded(q: QTensor, codes: Tensor) -> QTensor:
    """The same tensor with other codes: scales, zero points and input steps stay.

    Args:
        q: in its stored order.
        codes: as `Layout.unpack` gives them, so of the stored shape in most layouts.
    """
    layout, spec, (old, scale, zero_point) = _unpacked(q)
    dtype = registry.dtypes.get(spec.dtype)
    new = layout.pack(codes.to(old.dtype).reshape(old.shape), scale, zero_point, spec, dtype)
    base = q.canonical()
    return to_layout(base.like({**base.parts, **new}), q.spec.layout)


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
