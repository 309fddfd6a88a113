"""The layout `plane32`: weights in 4 bits as matmuls with activations in 8 bits read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import WHOLE, DType, Layout, Spec
from ao_core.ext import Parts, make_parts
from ao_core.ext.numerics import full_block, pack_bits, unpack_bits
from ao_kernels.triton.shared.tiling import BLOCK_N, Tiling, from_blocks, pad, to_blocks
from ao_kernels.triton.shared.workspace import prepare
from ao_kernels.triton.w4a8.ptx import lower_nibbles, signed_nibbles, upper_nibbles

__all__ = ["ACTS", "PLANES", "PLANE_K", "WIDTH", "Plane32", "Stored", "stored", "tiling"]

#: planes of a tile, columns of each: those that a tensor core multiplies at once
PLANES, PLANE_K = 8, 32
#: K of a tile
WIDTH = PLANES * PLANE_K
_GROUPS = (32, 64, 128, 256)
#: codes and zero points of activations that matmuls take
ACTS = (("int8", "none"), ("uint8", "int"), ("f8e4m3", "none"))


class Stored(NamedTuple):
    """Codes of 4 bits as they are stored beside one type of activations."""

    #: exclusive or with it turns a canonical code into the stored one and back
    flip: int
    #: and then with this, those from 8 on
    flip_upper: int
    #: a matmul multiplies by (value - offset) / factor
    offset: int
    factor: float
    assembly: Callable[[], str]

    def turn(self, codes: Tensor) -> Tensor:
        """Canonical codes as stored ones, or the other way round."""
        flipped = codes ^ self.flip
        return flipped ^ (codes >> 3) * self.flip_upper if self.flip_upper else flipped


def stored(numbers: str, *, integers: bool) -> Stored:
    """How "int4" or "uint4" is stored for matmuls in integers, or in float8.

    As the upper half of a signed byte a code is 16 times too large. As the lower half of an e4m3, where
    steps are 2**-9, it is that much too small; what is signed has a magnitude there, which counts from 1 on
    where it is negative.
    """
    signed = numbers == "int4"
    if integers:
        flip, offset = (0, 0) if signed else (8, 8)
        return Stored(flip, 0, offset, 1 / 16, upper_nibbles)
    if signed:
        return Stored(0, 7, 0, 512.0, signed_nibbles)
    return Stored(0, 0, 0, 512.0, lower_nibbles)


def tiling(n: int, k: int, group: int) -> Tiling:
    """The tiles of a weight; a group of columns, or a row where `group` is at least k, has one scale."""
    chain = group // PLANE_K if group < k else 0
    return Tiling(n, k, PLANES, PLANE_K, chain, -(-n // BLOCK_N), -(-k // (PLANES * PLANE_K)))


class Plane32(Layout):
    """For a weight (N, K) in int4 or uint4, beside quantized activations: tiles of 128 rows and 256 columns.

    A tile has eight planes of 32 columns. Each 16 bytes of a row are four neighbouring columns of all of
    them: byte 4i + c has column c of plane 2i in its lower and of plane 2i + 1 in its upper half. So two
    instructions turn a register of four bytes into one of four neighbouring numbers. Parts:

    - qdata: int32 [N / 128, tiles, 128, 32]. Codes are as `stored` says.
    - scale, zero: [N / 128, groups, 128], in their own dtype.
    - sums: float32 [N / 128, 128], those of the values of rows, where activations have zero points.

    Stored codes, scales and sums of padding are 0.
    """

    name = "plane32"
    canonical = False
    canonical_name = "packed"
    auto_devices = ("cuda",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the planes cannot hold such a tensor."""
        act = spec.act
        if act is None:
            return "is for matmuls whose activations are quantized, found none in the format"
        if (act.dtype, act.zero_point) not in ACTS:
            return f"is for activations in int8, uint8 with zero points, or f8e4m3, found {act}"
        if (dtype.name, spec.zero_point) not in (
            ("int4", "none"),
            ("uint4", "int"),
            ("uint4", "float"),
        ):
            return f"holds int4, and uint4 with zero points, found {spec}"
        if spec.scale_dtype not in ("float32", "bfloat16", "float16"):
            return f"needs scales in float32, bfloat16 or float16, found {spec.scale_dtype}"
        if len(shape) != 2 or 0 in shape:
            return f"needs a 2-D weight that is not empty, found {shape}"
        rows, group = full_block(spec.block, shape)
        if rows != 1 or spec.block[0] == WHOLE or (group not in _GROUPS and group < shape[1]):
            return f"needs groups of {_GROUPS} along each row, or whole rows, found {spec.block}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Parts in planes, from canonical ones."""
        tiles, how = _tiles(spec, shape), _stored(spec)
        prepare(parts["qdata"].device)
        codes = unpack_bits(parts["qdata"].view(torch.uint8), 4, tiles.k)
        cut = (tiles.n_tiles, BLOCK_N, tiles.k_tiles, PLANES // 2, 2, PLANE_K // 4, 4)
        planes = pad(how.turn(codes), tiles.n_tiles * BLOCK_N, tiles.k_tiles * tiles.width).view(
            cut
        )
        nibbles = planes.permute(0, 2, 1, 5, 3, 6, 4).reshape(-1, PLANES)
        zero_point = parts.get("zero_point")
        out = make_parts(
            pack_bits(nibbles, 4)
            .view(torch.int32)
            .view(tiles.n_tiles, tiles.k_tiles, BLOCK_N, PLANE_K),
            to_blocks(parts["scale"], tiles),
            None if zero_point is None else to_blocks(zero_point, tiles),
        )
        if spec.act is not None and spec.act.zero_point != "none":
            sums = _row_sums(codes, parts["scale"], zero_point, full_block(spec.block, shape)[-1])
            out["sums"] = pad(sums[:, None], tiles.n_tiles * BLOCK_N, 1).view(
                tiles.n_tiles, BLOCK_N
            )
        return out

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Canonical parts, from those in planes."""
        tiles, how = _tiles(spec, shape), _stored(spec)
        nibbles = unpack_bits(parts["qdata"].view(torch.uint8), 4, PLANE_K * PLANES)
        cut = (tiles.n_tiles, tiles.k_tiles, BLOCK_N, PLANE_K // 4, PLANES // 2, 4, 2)
        codes = nibbles.view(cut).permute(0, 2, 1, 4, 6, 3, 5).reshape(tiles.n_tiles * BLOCK_N, -1)
        codes = how.turn(codes[: tiles.n, : tiles.k].contiguous())
        zero_point = parts.get("zero_point")
        return make_parts(
            pack_bits(codes, 4),
            from_blocks(parts["scale"], spec, tiles),
            None if zero_point is None else from_blocks(zero_point, spec, tiles),
        )


def _tiles(spec: Spec, shape: tuple[int, ...]) -> Tiling:
    n, k = shape
    return tiling(n, k, full_block(spec.block, shape)[-1])


def _stored(spec: Spec) -> Stored:
    assert spec.act is not None  # the layout has said that it fits
    return stored(spec.dtype, integers=spec.act.dtype != "f8e4m3")


def _row_sums(codes: Tensor, scale: Tensor, zero_point: Tensor | None, group: int) -> Tensor:
    """float32 (N,): sums of the values of rows, of int4 where there are no zero points."""
    (n, k), groups = codes.shape, scale.shape[1]
    # int4 in offset binary is unsigned, around 8
    unsigned, middle = (codes, zero_point.double()) if zero_point is not None else (codes ^ 8, 8)
    padded = pad(unsigned, n, groups * group).view(n, groups, -1)
    counts = torch.full((groups,), padded.shape[-1], device=codes.device)
    counts[-1] += k - counts.sum()
    sums = padded.sum(-1, dtype=torch.int32).double() - middle * counts
    return (sums * scale.double()).sum(1).float()
