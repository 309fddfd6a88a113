"""The layouts `plane16` and `plane16_bytes`: weights as the Triton matmuls read them, a tile in a piece."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ao_core import WHOLE, DType, Layout, QTensor, Spec
from ao_core.ext import Parts, make_parts
from ao_core.ext.numerics import full_block, pack_bits, unpack_bits
from ao_kernels.triton.shared.tiling import BLOCK_N, Tiling, from_blocks, pad, to_blocks
from ao_kernels.triton.shared.workspace import prepare
from ao_kernels.triton.weight_only.float4_ptx import gather_bits, spread_bits
from ao_kernels.triton.weight_only.formats import Format, format_of, known
from ao_kernels.triton.weight_only.packing import interleave, pack_words, separate, unpack_words
from ao_kernels.triton.weight_only.scales import unfit_scale

__all__ = ["LAYOUTS", "Plane16", "tiling"]

#: columns that can share a scale, where a tile is as wide
GROUPS = (16, 32, 64, 128, 256)


def tiling(n: int, k: int, group: int, fmt: Format) -> Tiling:
    """The tiles of a weight; a group of columns, or a row where `group` is at least k, has one scale."""
    # registers hold what a tile of 256 columns becomes, and shared memory three such tiles of several words
    planes, plane = fmt.planes, min(64, 256 // fmt.planes) if fmt.words == 1 else 16
    if group < k:
        plane = min(plane, group)
    chain = group // plane if group < k else 0
    return Tiling(n, k, planes, plane, chain, -(-n // BLOCK_N), -(-k // (planes * plane)))


class Plane16(Layout):
    """For a weight (N, K), or (E, N, K), of up to 8 bits: tiles of 128 of N and 2 to 16 planes.

    A plane is a slice of the tile along K. As many codes as a tile has planes fill words of 16 bits (see
    `weight_only.packing`): with 4 bits, bits 4j and up of a word are the code of plane j,
    except in formats with a LUT and bit-interleaved ones. So the words of a row in a tile hold runs of
    neighbouring K, and a matmul takes activations as they are. Parts:

    - qdata: int16 […, N / 128, tiles, words, 128, plane]. Signed integers are stored in offset binary.
    - scale, zero: […, N / 128, groups, 128], in their own dtype. Scales of 8 bits have those of a row and a
      tile beside each other: […, N / 128, tiles, 128 · groups of a tile].
    - global_scale: float32 […, 1], the second-level scale where scales are quantized (double quantization).
    - table: int32 […, words], the bits of every code's float32 value, and what else `Format.table` says.

    Rows and columns of padding have code 0 and scale 0.
    """

    name = "plane16"
    canonical = False
    canonical_name = "packed"
    auto_devices = ("cuda",)
    stacked = True
    #: whether two of every four columns have codes
    sparse = False

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the planes cannot hold such a tensor."""
        fmt = format_of(dtype, sparse=self.sparse)
        if isinstance(fmt, str):
            return fmt
        if spec.zero_point == "offset":
            return "takes zero points in the domain of codes, not offsets"
        if (spec.zero_point != "none") != (fmt.offset != 0):
            return f"has zero points of unsigned integers, and only with them, found {spec}"
        if spec.act is not None:
            return "its matmul does not quantize activations"
        if reason := unfit_scale(spec.scale_dtype):
            return reason
        if len(shape) not in (2, 3) or 0 in shape:
            return f"needs a weight of 2 or 3 dimensions that is not empty, found {shape}"
        width = tiling(shape[-2], shape[-1], shape[-1], fmt).width
        groups = tuple(size for size in (GROUPS[1:] if self.sparse else GROUPS) if size <= width)
        *rows, group = full_block(spec.block, shape)
        along_rows = set(rows) == {1} and WHOLE not in (spec.block[0], *spec.block[:-1])
        if not along_rows or (group not in groups and group < shape[-1]):
            return f"needs groups of {groups} along each row, or whole rows, found {spec.block}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Parts in planes, from canonical ones."""
        return _of_each(self.pack_matrix, parts, spec, shape, dtype)

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Canonical parts, from those in planes."""
        return _of_each(self.unpack_matrix, parts, spec, shape, dtype)

    def pack_matrix(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """`from_canonical` for a weight (N, K)."""
        fmt, tiles = known_tiles(spec, shape, dtype)
        codes = unpack_bits(parts["qdata"].view(torch.uint8), fmt.bits, tiles.k) ^ fmt.flip
        codes = pad(codes, tiles.n_tiles * BLOCK_N, tiles.k_tiles * tiles.width)
        cut = (tiles.n_tiles, BLOCK_N, tiles.k_tiles, tiles.planes, tiles.plane_k)
        planes = codes.view(cut).permute(0, 2, 1, 4, 3)
        words = pack_words(planes, fmt.bits).permute(0, 1, 4, 2, 3).contiguous()
        if fmt.is_lut:
            words = interleave(words)
        if fmt.bit_interleaved:
            words = spread_bits(words)
        out = {"qdata": words, **to_scales(parts["scale"], tiles)}
        if "zero_point" in parts:
            out["zero_point"] = to_blocks(parts["zero_point"], tiles)
        prepare(words.device)
        return {**out, "table": fmt.table().to(words.device)}

    def unpack_matrix(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """`to_canonical` for a weight (N, K)."""
        fmt, tiles = known_tiles(spec, shape, dtype)
        words = gather_bits(parts["qdata"]) if fmt.bit_interleaved else parts["qdata"]
        if fmt.is_lut:
            words = separate(words)
        planes = unpack_words(words.permute(0, 1, 3, 4, 2), fmt.bits)
        codes = planes.permute(0, 2, 1, 4, 3).reshape(tiles.n_tiles * BLOCK_N, -1)
        codes = codes[: tiles.n, : tiles.k].contiguous() ^ fmt.flip
        zero_point = parts.get("zero_point")
        packed = pack_bits(codes, fmt.bits)
        return make_parts(
            packed.view(dtype.storage) if self.canonical_name == "plain" else packed,
            from_scales(parts, spec, tiles),
            None if zero_point is None else from_blocks(zero_point, spec, tiles),
        )


class Plane16Bytes(Plane16):
    """`Plane16` of whole bytes, whose canonical layout is another one."""

    name = "plane16_bytes"
    canonical_name = "plain"

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the planes cannot hold such a tensor."""
        if dtype.bits != 8:
            return f"holds codes of 8 bits, and {dtype.name} has {dtype.bits}"
        return super().refuses(spec, shape, dtype)


LAYOUTS = (Plane16(), Plane16Bytes())


def _of_each(
    convert: Callable[[Parts, Spec, tuple[int, ...], DType], Parts],
    parts: Parts,
    spec: Spec,
    shape: tuple[int, ...],
    dtype: DType,
) -> Parts:
    """What `convert` makes of a matrix; of the matrices of experts, stacked, one at a time."""
    if len(shape) == 2:
        return convert(parts, spec, shape, dtype)
    pieces = [
        convert({name: _matrix(part, e) for name, part in parts.items()}, spec, shape[1:], dtype)
        for e in range(shape[0])
    ]
    return {name: _stacked([piece[name] for piece in pieces]) for name in pieces[0]}


def _matrix(part: Tensor, e: int) -> Tensor:
    """A part of one matrix; of scales that are quantized themselves, with their scale or the one for all."""
    if not isinstance(part, QTensor):
        return part[e]
    codes = part.qdata[e]
    global_scale = part.scale.expand(len(part.qdata), 1, 1)[e]
    return QTensor(
        {"qdata": codes, "scale": global_scale}, part.spec, tuple(codes.shape), part.dtype
    )


def _stacked(pieces: list[Tensor]) -> Tensor:
    """Inverse of `_matrix`."""
    nested = [piece for piece in pieces if isinstance(piece, QTensor)]
    if not nested:
        return torch.stack(pieces)
    first = nested[0]
    codes, global_scale = (
        torch.stack([p.parts[name] for p in nested]) for name in ("qdata", "scale")
    )
    if len(first.spec.block) == codes.dim():
        global_scale = global_scale[:1]
    return QTensor(
        {"qdata": codes, "scale": global_scale}, first.spec, tuple(codes.shape), first.dtype
    )


def known_tiles(
    spec: Spec, shape: tuple[int, ...], dtype: DType, *, sparse: bool = False
) -> tuple[Format, Tiling]:
    """How the numbers of a weight are stored, and how it is cut up."""
    fmt, (n, k) = known(dtype, sparse=sparse), shape
    return fmt, tiling(n, k, full_block(spec.block, shape)[-1], fmt)


def to_scales(scale: Tensor, tiles: Tiling) -> Parts:
    """The parts `scale`, and `global_scale` where scales are quantized themselves."""
    if isinstance(scale, QTensor):
        return {**to_scales(scale.qdata, tiles), "global_scale": scale.scale.reshape(1).clone()}
    if scale.dtype.itemsize > 1:
        return {"scale": to_blocks(scale, tiles)}
    padded = pad(scale.view(torch.uint8), tiles.n_tiles * BLOCK_N, tiles.groups)
    cut = padded.view(
        tiles.n_tiles, BLOCK_N, tiles.groups // tiles.groups_per_tile, tiles.groups_per_tile
    ).transpose(1, 2)
    rows = cut.reshape(tiles.n_tiles, -1, BLOCK_N * tiles.groups_per_tile).contiguous()
    return {"scale": rows.view(scale.dtype)}


def from_scales(parts: Parts, spec: Spec, tiles: Tiling) -> Tensor:
    """Inverse of `to_scales`."""
    scale = parts["scale"]
    if scale.dtype.itemsize > 1:
        return from_blocks(scale, spec, tiles)
    cut = (
        scale.view(torch.uint8)
        .unflatten(-1, (BLOCK_N, tiles.groups_per_tile))
        .transpose(2, 3)
        .flatten(1, 2)
    )
    grid = from_blocks(cut, spec, tiles).view(scale.dtype)
    if not isinstance(spec.scale_dtype, Spec):
        return grid
    nested = {"qdata": grid, "scale": parts["global_scale"].reshape(1, 1).clone()}
    return QTensor(nested, spec.scale_dtype, tuple(grid.shape), torch.float32)
