"""One value per block of a weight, as tiles hold them: a row of each for every 16 rows of the weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, DType, QTensor, Spec
from ao_core.ext import SCALE_DTYPES, Parts, registry
from ao_core.ext.numerics import expand, full_block, grid_shape
from ao_kernels.cpu.codes import codes_of

__all__ = [
    "SIDE",
    "Grid",
    "from_tiles",
    "grid_of",
    "scale_of_parts",
    "scale_parts",
    "to_tiles",
    "unfit_scale",
]

#: rows and columns of a tile
SIDE = 16
#: layouts of quantized scales, each with all its codes in order
_LAYOUTS = ("plain", "packed")


class Grid(NamedTuple):
    """How a matrix of n rows and k columns is cut up."""

    n: int
    k: int
    #: extents of a block of the scale along every dimension of the weight
    block: tuple[int, ...]
    #: columns that share a scale, how many such groups there are
    group: int
    groups: int
    #: blocks of 16 rows, tiles of 16 columns in each
    row_blocks: int
    tiles: int
    #: extents of what shares a scale of the scales, or of a matrix; groups in it
    outer_block: tuple[int, ...]
    span: int


def grid_of(spec: Spec, shape: tuple[int, ...]) -> Grid:
    """The tiles of a weight; no tile reaches over the end of a group."""
    n, k = shape[-2:]
    block = full_block(spec.block, shape)
    group = block[-1]
    groups = -(-k // group)
    last = k - (groups - 1) * group
    tiles = (groups - 1) * -(-group // SIDE) + -(-last // SIDE)
    shared = spec.scale_dtype.block if isinstance(spec.scale_dtype, Spec) else (WHOLE, WHOLE)
    scales = full_block(shared, grid_shape(shape, spec.block))
    outer = tuple(min(a * b, size) for a, b, size in zip(block, scales, shape, strict=True))
    return Grid(n, k, block, group, groups, -(-n // SIDE), tiles, outer, scales[-1])


def unfit_scale(scale: str | Spec) -> str | None:
    """Why the tiles cannot hold such scales, or zero points that are stored as these."""
    if isinstance(scale, str):
        return None
    plain = scale.zero_point == "none" and scale.act is None and scale.layout in _LAYOUTS
    known = _storage(registry.dtypes.get(scale.dtype)) is not None
    if plain and known and scale.scale_dtype in SCALE_DTYPES:
        return None
    return (
        "holds quantized scales as integers or f8e4m3 of at most 8 bits, in layout 'plain' or 'packed', with "
        f"scales in {', '.join(SCALE_DTYPES)}, found {scale}"
    )


def scale_parts(name: str, scale: Tensor, grid: Grid, shape: tuple[int, ...]) -> Parts:
    """The part `name` of scales, and `name`_outer of those that are quantized: the scales of these."""
    if not isinstance(scale, QTensor):
        return {name: to_tiles(scale, grid.block, grid, shape)}
    layout = registry.layouts.get(scale.spec.layout)
    codes, outer, _ = layout.unpack(scale.parts, scale.spec, scale.stored_shape, scale.format)
    assert outer is not None  # the layout has accepted it
    return {
        name: to_tiles(_numbers(codes, scale.format), grid.block, grid, shape),
        f"{name}_outer": to_tiles(outer, grid.outer_block, grid, shape),
    }


def scale_of_parts(
    name: str, parts: Parts, spec: Spec, grid: Grid, shape: tuple[int, ...]
) -> Tensor:
    """Inverse of `scale_parts`, for a weight in the format `spec`."""
    values = from_tiles(parts[name], grid.block, grid)
    if not isinstance(spec.scale_dtype, Spec):
        return values
    nested, stored = spec.scale_dtype, tuple(values.shape)
    fmt, layout = registry.dtypes.get(nested.dtype), registry.layouts.get(nested.layout)
    outer = from_tiles(parts[f"{name}_outer"], grid.outer_block, grid)
    parts = layout.pack(_codes(values, fmt), outer, None, nested, fmt)
    return QTensor(parts, nested, stored, torch.float32)


def to_tiles(values: Tensor, block: tuple[int, ...], grid: Grid, shape: tuple[int, ...]) -> Tensor:
    """(…, row blocks, groups, 16) of one value per block; rows of padding get zero bytes."""
    raw = _movable(values)
    rows = (*shape[:-1], raw.shape[-1])
    raw = expand(raw, rows, (*block[:-1], 1)).expand(rows)
    if padding := grid.row_blocks * SIDE - grid.n:
        raw = F.pad(raw, (0, 0, 0, padding))
    tiles: Tensor = raw.unflatten(-2, (grid.row_blocks, SIDE)).transpose(-1, -2)
    return tiles.clone(memory_format=torch.contiguous_format).view(values.dtype)


def from_tiles(tiles: Tensor, block: tuple[int, ...], grid: Grid) -> Tensor:
    """Inverse of `to_tiles`: the value of the first row of each block."""
    rows = _movable(tiles).transpose(-1, -2).flatten(-3, -2)[..., : grid.n : block[-2], :]
    values = rows[:: block[0]] if rows.dim() == 3 else rows
    return values.clone(memory_format=torch.contiguous_format).view(tiles.dtype)


def _movable(values: Tensor) -> Tensor:
    """Floats of 8 bits as bytes, because torch moves few of them."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def _storage(fmt: DType) -> torch.dtype | None:
    """What a scale's code is stored in: the number itself; None where that takes a table."""
    if fmt.storage == torch.float8_e4m3fn:
        return fmt.storage
    if fmt.kind != "int" or fmt.bits > 8 or codes_of(fmt).kind != 1:
        return None
    return torch.int8 if fmt.min < 0 else torch.uint8


def _numbers(codes: Tensor, fmt: DType) -> Tensor:
    storage = _storage(fmt)
    assert storage is not None  # the layout has accepted it
    return codes.view(storage) if storage.is_floating_point else fmt.decode(codes).to(storage)


def _codes(numbers: Tensor, fmt: DType) -> Tensor:
    if numbers.is_floating_point():
        return numbers.view(torch.uint8)
    return fmt.encode(numbers.to(torch.float32))
