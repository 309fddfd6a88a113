"""The layouts `cpu_tiles` and `cpu_tiles8`: weights as the C++ matmuls read them, 16 rows at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, DType, Layout, Spec
from ao_core.ext import Parts
from ao_kernels.cpu.codes import Codes, codes_of
from ao_kernels.cpu.grids import (
    SIDE,
    Grid,
    from_tiles,
    grid_of,
    scale_of_parts,
    scale_parts,
    to_tiles,
    unfit_scale,
)
from ao_kernels.cpu.library import load

__all__ = ["AFFINE", "LAYOUTS", "CpuTiles", "act_code", "grid_of", "table_of"]

#: how the matmuls quantize activations, per token: (dtype, zero point) -> `Act` of the C++ kernels
_ACTS = {
    ("int8", "none"): 1,
    ("uint8", "int"): 2,
    ("f8e4m3", "none"): 3,
    ("f8e5m2", "none"): 4,
}
#: the parts that make values of the codes' ones, in the order of the ops
AFFINE = ("scale", "scale_outer", "zero_point", "offset", "offset_outer")


def table_of(parts: Parts) -> Tensor:
    """The values of the codes, as the bits of float32, which all matrices of a weight share."""
    table = parts["table"]
    return table if table.dim() == 1 else table[0]


def act_code(act: Spec | None, dtype: DType) -> int:
    """The `Act` by which a matmul with codes of `dtype` quantizes activations.

    0: activations are not quantized, or before the matmul, which takes them as they are then.
    """
    if act is None or act.scale_dtype != "float32":
        return 0
    alike = (WHOLE, WHOLE) if act.static else (1, WHOLE)
    if act.block not in (alike, (WHOLE,)):
        return 0
    code = _ACTS.get((act.dtype, act.zero_point), 0)
    # integers are multiplied by integers only
    return code if not act.dtype.endswith("int8") or codes_of(dtype).are_integers else 0


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
    - offset: the same, in place of zero where zero points are scaled.
    - scale_outer, offset_outer: where scale and offset are quantized themselves, the scales of these,
      (…, row blocks, spans of groups, 16). Their codes are stored as numbers of 8 bits: uint8, int8, f8e4m3.
    - rowsum: float32 (…, rows), sums of the dequantized rows where the matmul gives activations a zero point.
    """

    name = "cpu_tiles"
    canonical = False
    canonical_name = "packed"
    auto_devices = ("cpu",)
    stacked = True
    row_block = SIDE
    common = ("table",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the tiles cannot hold such a tensor."""
        bytes_only = self.canonical_name == "plain"
        if dtype.bits > 8 or (dtype.bits == 8) != bytes_only:
            wanted = "8 bits" if bytes_only else "1 to 7 bits"
            return f"holds codes of {wanted}, and {dtype.name} has {dtype.bits}"
        if dtype.kind == "codebook":
            return f"has one table for all, and {dtype.name} one for each block"
        if spec.act is not None and spec.act.is_static and len(shape) == 3:
            return "has no static scales of the activations of each expert"
        if len(shape) not in (2, 3) or 0 in shape:
            return f"needs a weight of 2 or 3 dimensions that is not empty, found {shape}"
        grid = grid_of(spec, shape)
        if grid.k >= 64 and 3 * grid.tiles * SIDE > 4 * grid.k:
            return f"pads groups to multiples of 16 columns, too much for groups of {grid.group}"
        if spec.zero_point == "int" and codes_of(dtype).kind != 1:
            return (
                f"has integer zero points only of formats that count up by 1, not of {dtype.name}"
            )
        return unfit_scale(spec.scale_dtype)

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Parts in tiles; raises `RuntimeError` where the C++ library cannot be loaded."""
        load()
        grid, codes = grid_of(spec, shape), codes_of(dtype)
        packed = parts["qdata"].view(torch.uint8).contiguous()
        where = (grid.n, grid.k, codes.bits, grid.group, codes.flip)
        out = {"qdata": torch.ops.ao_kernels.pack_tiles(packed, *where)}
        table = torch.tensor(codes.values, dtype=torch.float32, device=packed.device)
        table = table.view(torch.int32)
        out["table"] = table if len(shape) == 2 else table.repeat(shape[0], 1)
        out |= scale_parts("scale", parts["scale"], grid, shape)
        if spec.zero_point == "offset":
            out |= scale_parts("offset", parts["zero_point"], grid, shape)
        elif spec.zero_point != "none":
            out["zero_point"] = to_tiles(parts["zero_point"], grid.block, grid, shape)
        if spec.act is not None and spec.act.zero_point != "none" and act_code(spec.act, dtype):
            out["rowsum"] = _row_sums(out, grid, codes)
        return out

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Parts of the canonical layout; raises `RuntimeError` as `from_canonical` does."""
        load()
        grid, codes = grid_of(spec, shape), codes_of(dtype)
        where = (grid.n, grid.k, codes.bits, grid.group, codes.flip)
        packed = torch.ops.ao_kernels.unpack_tiles(parts["qdata"], *where)
        storage = dtype.storage if self.canonical_name == "plain" else torch.uint8
        out = {"qdata": packed.view(storage)}
        out["scale"] = scale_of_parts("scale", parts, spec, grid, shape)
        if spec.zero_point == "offset":
            out["zero_point"] = scale_of_parts("offset", parts, spec, grid, shape)
        elif spec.zero_point != "none":
            out["zero_point"] = from_tiles(parts["zero_point"], grid.block, grid)
        return out


class CpuTiles8(CpuTiles):
    """`CpuTiles` of whole bytes, whose canonical layout is another one."""

    name = "cpu_tiles8"
    canonical_name = "plain"


LAYOUTS = (CpuTiles(), CpuTiles8())


def _row_sums(parts: Parts, grid: Grid, codes: Codes) -> Tensor:
    """Sums of the dequantized rows: a matmul with ones, which reads no more than the codes."""
    ones = torch.ones(1, grid.k, device=parts["qdata"].device)

    def sums(of: Parts) -> Tensor:
        out: Tensor = torch.ops.ao_kernels.linear(
            ones, of["qdata"], *(of.get(name) for name in AFFINE), None,
            table_of(of), None, grid.n, codes.bits, grid.group, grid.span, codes.kind, 0,
        )  # fmt: skip
        return F.pad(out.reshape(grid.n), (0, grid.row_blocks * SIDE - grid.n))

    if parts["qdata"].dim() == 3:
        return sums(parts)
    experts = range(parts["qdata"].shape[0])
    return torch.stack([sums({name: part[e] for name, part in parts.items()}) for e in experts])
