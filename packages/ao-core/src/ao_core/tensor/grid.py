"""The values that a quantized tensor can take while its scales and zero points stay: a grid per element.

Algorithms that round weights one after the other (GPTQ, learned rounding) choose codes on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Layout, scale_values, zero_values
from ao_core.numerics import (
    dequantize_affine,
    expand,
    grid_shape,
    quantize_affine,
    zero_to_float,
)
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.input_steps import stored_spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import to_layout

__all__ = ["Grid", "Level", "Rounder", "grid_of", "regridded"]

#: kinds of number formats whose values a scale multiplies
_SCALED = ("int", "float", "lut")


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
        round_column: of layouts where a value follows from several codes of its column, `Layout.round_column`
            of (column, scales); such a grid has no nearest value of one element.
    """

    dtype: DType
    shape: tuple[int, ...]
    block: tuple[int, ...]
    block_of: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    is_offset: bool
    round_column: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def rounder(self, block_of: Tensor) -> Rounder:
        """Rounds the columns of a matrix whose weights are in the blocks `block_of` (N, K)."""
        if self.round_column is not None:
            assert self.scale is not None
            return _WholeColumns(self.round_column, self.scale, block_of)
        return _Levels(self, block_of)

    def level(self, block_of: Tensor) -> Level:
        """The values that elements can take whose blocks are these, for many calls of `Level.nearest`."""
        return Level(self, block_of)

    def codes(self, chosen: Tensor) -> Tensor:
        """The codes of what `Level.nearest` chose."""
        return self.dtype.encode(chosen) if self.dtype.kind in _SCALED else chosen

    def nearest(self, x: Tensor, block_of: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of the nearest values to `x`, and these values in float32.

        Args:
            x: any floating-point numbers; compared in float32, as the reference kernel does.
            block_of: the blocks that they are in, in the same shape: a part of `self.block_of`.

        Raises:
            UnsupportedOp: values follow from several codes.
        """
        if self.round_column is not None:
            raise UnsupportedOp(
                "a value on this grid follows from several codes of its column; use `Grid.rounder`"
            )
        scale = None if self.scale is None else self.scale[block_of]
        zero = None if self.zero_point is None else self.zero_point[block_of]
        alone, offset = (1,) * x.dim(), self.is_offset  # each element is a block
        by = None if scale is None else torch.where(scale == 0, torch.inf, scale)
        if self.dtype.kind == "codebook":
            by = scale  # values, of which one may be 0
        codes = quantize_affine(x.float(), self.dtype, alone, by, zero, is_offset=offset)
        return codes, dequantize_affine(codes, self.dtype, alone, scale, zero, is_offset=offset)


class Level:
    """What `Grid.nearest` does for elements of the same blocks again and again, with scales looked up once.

    It gives the same bits. Of formats with a scale it chooses values of the format, which `Grid.codes`
    encodes all at once; of others, codes.
    """

    def __init__(self, grid: Grid, block_of: Tensor) -> None:
        self._grid, self._block_of, dtype = grid, block_of, grid.dtype
        self._is_scaled = dtype.kind in _SCALED and grid.scale is not None
        #: the dtype of what is chosen
        self.choice = torch.float32 if dtype.kind in _SCALED else dtype.code_dtype
        if not self._is_scaled:
            return
        assert grid.scale is not None
        self._scale = grid.scale[block_of]
        self._by = torch.where(self._scale == 0, torch.inf, self._scale)
        zero = None if grid.zero_point is None else grid.zero_point[block_of]
        self._zero = None if zero is None else zero_to_float(zero, dtype)

    def nearest(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The nearest values to `x` in float32; writes what was chosen into `chosen`."""
        if not self._is_scaled:
            codes, values = self._grid.nearest(x, self._block_of)
            chosen.copy_(self._grid.dtype.decode(codes) if chosen.is_floating_point() else codes)
            return values
        zero, offset, dtype = self._zero, self._grid.is_offset, self._grid.dtype
        chosen.copy_(x)
        if zero is not None and offset:
            chosen.add_(zero)
        chosen.div_(self._by)
        if zero is not None and not offset:
            chosen.add_(zero)
        if dtype.kind == "int":  # what encode and decode give, in a quarter of the time
            chosen.round_().clamp_(dtype.min, dtype.max)
        else:
            chosen.copy_(dtype.decode(dtype.encode(chosen)))
        values = chosen.clone() if zero is None or offset else chosen - zero
        values.mul_(self._scale)
        return values.sub_(zero) if zero is not None and offset else values


class Rounder(Protocol):
    """Rounds the columns of a matrix one after the other, in an order of the caller's."""

    def nearest(self, x: Tensor, place: int) -> Tensor:
        """The values (N,) in float32 nearest to a column (N,), the next one; `place` is its number."""

    def codes(self) -> Tensor:
        """The codes of all columns, in their order, as `regridded` takes them."""


class _Levels:
    """Element by element, with scales looked up once for neighbours in one block, as most are."""

    def __init__(self, grid: Grid, block_of: Tensor) -> None:
        self._grid, self._blocks_KN = grid, block_of.t().contiguous()
        changes = (self._blocks_KN[1:] != self._blocks_KN[:-1]).any(1).tolist()
        self._is_new = [True, *changes]
        self._level = grid.level(self._blocks_KN[0])
        self._chosen_KN = torch.empty_like(self._blocks_KN, dtype=self._level.choice)

    def nearest(self, x: Tensor, place: int) -> Tensor:
        if self._is_new[place]:
            self._level = self._grid.level(self._blocks_KN[place])
        return self._level.nearest(x, self._chosen_KN[place])

    def codes(self) -> Tensor:
        return self._grid.codes(self._chosen_KN.t())


class _WholeColumns:
    """Columns whose values follow from several codes."""

    def __init__(
        self,
        round_column: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        scale: Tensor,
        block_of: Tensor,
    ) -> None:
        self._round, self._scale, self._block_of = round_column, scale, block_of
        self._codes: list[Tensor] = []

    def nearest(self, x: Tensor, place: int) -> Tensor:
        codes, values = self._round(x, self._scale[self._block_of[:, place]])
        self._codes.append(codes)
        return values

    def codes(self) -> Tensor:
        return torch.stack(self._codes, 1)


def grid_of(q: QTensor) -> Grid:
    """The grid of a tensor in its stored order, over its stored (stepped) values.

    Raises:
        UnsupportedOp: its layout holds only some of the elements, or neither follows a value from one code
            nor are columns rounded alone, or it is permuted.
    """
    layout, spec, (codes, scale, zero_point) = _unpacked(q)
    dtype, shape, round_column = registry.dtypes.get(spec.dtype), tuple(codes.shape), None
    if not layout.affine:
        if type(layout).round_column is Layout.round_column:
            raise UnsupportedOp(
                f"{q.spec}: in the layout {layout.name!r} a value follows from more than its code"
            )
        shape = q.stored_shape
        round_column = partial(layout.round_column, spec=spec, dtype=dtype)
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
        round_column,
    )


def regridded(
    q: QTensor, codes: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> QTensor:
    """The same tensor with other codes; input steps stay, and scales and zero points unless they are given.

    Args:
        q: in its stored order.
        codes: as `Layout.unpack` gives them, of the stored shape in most layouts: those of `Grid.nearest` or
            `Rounder.codes`.
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
