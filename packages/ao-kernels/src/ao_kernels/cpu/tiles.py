"""The layouts `cpu_tiles` and `cpu_tiles8`: weights as the C++ products read them, 16 rows at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.layouts import Layout, Parts
from ao_core.numerics import expand, full_block
from ao_core.records import DType
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import QTensor
from ao_kernels.cpu.codes import Codes, codes_of
from ao_kernels.cpu.library import load

__all__ = ["ACTS", "LAYOUTS", "CpuTiles", "Grid", "grid_of", "table_of"]

#: rows and columns of a tile
SIDE = 16
#: how activations may be quantized, per token: (dtype, zero point) -> `Act` of the C++ kernels
ACTS = {
    ("int8", "none"): 1,
    ("uint8", "int"): 2,
    ("f8e4m3", "none"): 3,
    ("f8e5m2", "none"): 4,
}


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


def grid_of(spec: Spec, shape: tuple[int, ...]) -> Grid:
    """The tiles of a weight; no tile reaches over the end of a group."""
    n, k = shape[-2:]
    block = full_block(spec.block, shape)
    group = block[-1]
    groups = -(-k // group)
    last = k - (groups - 1) * group
    tiles = (groups - 1) * -(-group // SIDE) + -(-last // SIDE)
    return Grid(n, k, block, group, groups, -(-n // SIDE), tiles)


def table_of(parts: Parts) -> Tensor:
    """The values of the codes as float32, which all matrices of a weight share."""
    table = parts["table"].view(torch.float32)
    return table if table.dim() == 1 else table[0]


class CpuTiles(Layout):
    """For a weight (N, K), or (E, N, K), with codes of b bits.

    Blocks of 16 rows are stored one after the other, in each the tiles of 16 columns from left to
    right; a group of columns that shares a scale begins with a new tile. Parts:

    - qdata: uint8 (…, row blocks, tiles, 32 * b). A tile holds its codes as planes of 4, 2 and 1 bits
      (or 8), in which the codes of a row lie in the 4 bytes of a lane. Signed integers are stored in
      offset binary. Padding has code 0.
    - table: int32 (…, 2**b), the bits of every code's float32 value (so that NaN equals NaN): a part,
      because torch.export decomposes no program with constant tensors.
    - scale, zero: (…, row blocks, groups, 16), as the canonical layout stores them, one for each row.
    - outer: float32 (…, 1), the scale of the scales where these are quantized themselves.
    - rowsum: float32 (…, rows), sums of the dequantized rows where activations have a zero point.
    """

    name = "cpu_tiles"
    canonical = False
    canonical_name = "packed"
    native_devices = ("cpu",)
    stacked = True

    def fits(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the tiles cannot hold such a tensor."""
        bytes_only = self.canonical_name == "plain"
        if dtype.bits > 8 or (dtype.bits == 8) != bytes_only:
            wanted = "8 bits" if bytes_only else "1 to 7 bits"
            return f"holds codes of {wanted}, and {dtype.name} has {dtype.bits}"
        if dtype.kind == "table":
            return f"has one table for all, and {dtype.name} one for each block"
        if len(shape) not in (2, 3) or 0 in shape:
            return f"needs a weight of 2 or 3 dimensions that is not empty, found {shape}"
        grid = grid_of(spec, shape)
        if grid.k >= 64 and 3 * grid.tiles * SIDE > 4 * grid.k:
            return f"pads groups to multiples of 16 columns, too much for groups of {grid.group}"
        if spec.zero == "scaled":
            return "has zero points in the domain of codes, not scaled ones"
        if spec.zero == "int" and codes_of(dtype).kind != 1:
            return (
                f"has integer zero points only of formats that count up by 1, not of {dtype.name}"
            )
        return unfit_scale(spec.scale_dtype) or _unfit_act(spec.act, dtype)

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Parts in tiles; raises `RuntimeError` where the C++ library cannot be loaded."""
        load()
        grid, codes, scale = grid_of(spec, shape), codes_of(dtype), parts["scale"]
        packed = parts["qdata"].view(torch.uint8).contiguous()
        where = (grid.n, grid.k, codes.bits, grid.group, codes.flip)
        out = {"qdata": torch.ops.ao_kernels.pack_tiles(packed, *where)}
        table = torch.tensor(codes.values, dtype=torch.float32, device=packed.device)
        out["table"] = table.view(torch.int32).repeat(*shape[:-2], 1)
        if isinstance(scale, QTensor):
            out["scale"] = _to_tiles(scale.qdata, grid, shape)
            out["outer"] = scale.scale.expand(*shape[:-2], 1, 1).squeeze(-1).clone()
        else:
            out["scale"] = _to_tiles(scale, grid, shape)
        if "zero" in parts:
            out["zero"] = _to_tiles(parts["zero"], grid, shape)
        if spec.act is not None and spec.act.zero != "none":
            out["rowsum"] = _row_sums(out, grid, codes)
        return out

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Parts of the canonical layout; raises `RuntimeError` as `from_canonical` does."""
        load()
        grid, codes = grid_of(spec, shape), codes_of(dtype)
        where = (grid.n, grid.k, codes.bits, grid.group, codes.flip)
        packed = torch.ops.ao_kernels.unpack_tiles(parts["qdata"], *where)
        storage = dtype.storage if self.canonical_name == "plain" else torch.uint8
        out = {"qdata": packed.view(storage), "scale": _from_tiles(parts["scale"], grid)}
        if isinstance(spec.scale_dtype, Spec):
            codes_shape, outer = (
                tuple(out["scale"].shape),
                parts["outer"].reshape(*shape[:-2], 1, 1),
            )
            if len(spec.scale_dtype.block) == len(shape) == 3:
                outer = outer[:1]  # one for all matrices
            nested = {"qdata": out["scale"], "scale": outer.clone()}
            out["scale"] = QTensor(nested, spec.scale_dtype, codes_shape, torch.float32)
        if "zero" in parts:
            out["zero"] = _from_tiles(parts["zero"], grid)
        return out


class CpuTiles8(CpuTiles):
    """`CpuTiles` of whole bytes, whose canonical layout is another one."""

    name = "cpu_tiles8"
    canonical_name = "plain"


LAYOUTS = (CpuTiles(), CpuTiles8())


def unfit_scale(scale: str | Spec) -> str | None:
    """Why the tiles, and the planes of GPUs, cannot hold such scales."""
    if isinstance(scale, str):
        return None
    plain = Spec("f8e4m3", scale.block)
    if scale != plain or len(scale.block) < 2 or any(extent != WHOLE for extent in scale.block):
        return (
            f"holds quantized scales only as f8e4m3 with one float32 scale for all, found {scale}"
        )
    return None


def _unfit_act(act: Spec | None, dtype: DType) -> str | None:
    """Why the products cannot quantize activations like this."""
    if act is None:
        return None
    if act.static:
        return "chooses a scale of the activations for each token and call, and theirs is static"
    per_token = act.block in ((1, WHOLE), (WHOLE,))
    if (act.dtype, act.zero) not in ACTS or act.scale_dtype != "float32" or not per_token:
        return (
            "quantizes activations per token, with a float32 scale, to int8, to uint8 with zero "
            f"points, f8e4m3 or f8e5m2, not {act}"
        )
    if act.dtype in ("int8", "uint8") and not codes_of(dtype).are_integers:
        return f"multiplies {act.dtype} activations by integers only, and {dtype.name} is none"
    return None


def _to_tiles(grid_values: Tensor, grid: Grid, shape: tuple[int, ...]) -> Tensor:
    """(…, row blocks, groups, 16) of one value a block; rows of padding get zero bytes."""
    values = _movable(grid_values)
    rows = (*shape[:-1], grid.groups)
    values = expand(values, rows, (*grid.block[:-1], 1)).expand(rows)
    if padding := grid.row_blocks * SIDE - grid.n:
        values = F.pad(values, (0, 0, 0, padding))
    tiles: Tensor = values.unflatten(-2, (grid.row_blocks, SIDE)).transpose(-1, -2)
    return tiles.clone(memory_format=torch.contiguous_format).view(grid_values.dtype)


def _from_tiles(tiles: Tensor, grid: Grid) -> Tensor:
    """Inverse of `_to_tiles`: the value of the first row of each block."""
    rows = _movable(tiles).transpose(-1, -2).flatten(-3, -2)[..., : grid.n : grid.block[-2], :]
    values = rows[:: grid.block[0]] if rows.dim() == 3 else rows
    return values.clone(memory_format=torch.contiguous_format).view(tiles.dtype)


def _movable(values: Tensor) -> Tensor:
    """Floats of 8 bits as bytes, because torch moves few of them."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def _row_sums(parts: Parts, grid: Grid, codes: Codes) -> Tensor:
    """Sums of the dequantized rows: a product with ones, which reads no more than the codes."""
    ones = torch.ones(1, grid.k, device=parts["qdata"].device)

    def sums(of: Parts) -> Tensor:
        out: Tensor = torch.ops.ao_kernels.linear(
            ones, of["qdata"], of["scale"], of.get("outer"), of.get("zero"), None,
            table_of(of), None, grid.n, codes.bits, grid.group, codes.kind, 0,
        )  # fmt: skip
        return F.pad(out.reshape(grid.n), (0, grid.row_blocks * SIDE - grid.n))

    if parts["qdata"].dim() == 3:
        return sums(parts)
    experts = range(parts["qdata"].shape[0])
    return torch.stack([sums({name: part[e] for name, part in parts.items()}) for e in experts])
