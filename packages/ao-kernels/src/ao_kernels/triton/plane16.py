"""The layout `plane16`: 4-bit weights as the Triton products read them, a tile in one piece."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.layouts import Layout, Parts
from ao_core.layouts.base import make_parts
from ao_core.numerics import full_block, pack_bits, unpack_bits
from ao_core.records import DType
from ao_core.spec import WHOLE, Spec

__all__ = ["COLS", "LAYOUTS", "Plane16", "Tiling", "tiling"]

#: rows of a weight in a tile: columns of a product
COLS = 128
GROUPS = (32, 64, 128, 256)
_FORMATS = (("int4", "none"), ("uint4", "int"), ("uint4", "float"))


class Tiling(NamedTuple):
    """How a matrix of n rows and k columns is cut up."""

    n: int
    k: int
    #: columns of a plane; a tile has four planes
    plane: int
    #: planes that share a scale; 0: all of a row does
    chain: int
    #: blocks of `COLS` rows, tiles in each
    blocks: int
    tiles: int

    @property
    def groups(self) -> int:
        """Scales of a row, those of padding included."""
        return self.tiles * 4 // self.chain if self.chain else 1


def tiling(n: int, k: int, group: int) -> Tiling:
    """The tiles of a weight; `group`, one of `GROUPS` or at least k, columns share a scale."""
    plane = 32 if group == 32 < k else 64
    chain = group // plane if group < k else 0
    return Tiling(n, k, plane, chain, -(-n // COLS), -(-k // (4 * plane)))


class Plane16(Layout):
    """For a weight (N, K): tiles of 128 rows and four planes of 64 columns (32 where groups have 32).

    Bits 4j to 4j + 3 of a 16-bit word are the code of plane j: the words of a row in a tile hold four
    runs of neighbouring columns, so that a product takes activations as they are. Parts:

    - qdata: int16 [N / 128, tiles, 128, plane]. Signed codes have an offset of 8.
    - scale, zero: [N / 128, groups, 128], in their own dtype.

    Rows and columns of padding have code 0 and scale 0.
    """

    name = "plane16"
    canonical = False
    canonical_name = "packed"
    native_devices = ("cuda",)

    def fits(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the planes cannot hold such a tensor."""
        if (spec.dtype, spec.zero) not in _FORMATS:
            return (
                f"holds symmetric int4 or asymmetric uint4, not {spec.dtype} with zero={spec.zero}"
            )
        if spec.act is not None:
            return "its product does not quantize activations"
        if spec.scale_dtype not in ("float32", "bfloat16", "float16"):
            return f"needs scales in float32, bfloat16 or float16, found {spec.scale_dtype}"
        if len(shape) != 2 or 0 in shape:
            return f"needs a 2-D weight that is not empty, found {shape}"
        rows, group = full_block(spec.block, shape)
        if rows != 1 or spec.block[0] == WHOLE or (group not in GROUPS and group < shape[1]):
            return f"needs groups of {GROUPS} along each row, or whole rows, found {spec.block}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Parts in planes, from packed ones."""
        tiles = _tiling(spec, shape)
        codes = unpack_bits(parts["qdata"], 4, tiles.k)
        if spec.dtype == "int4":
            codes = codes ^ 8
        codes = _pad(codes, tiles.blocks * COLS, tiles.tiles * 4 * tiles.plane)
        planes = codes.view(tiles.blocks, COLS, tiles.tiles, 4, tiles.plane).permute(0, 2, 1, 4, 3)
        nibbles = planes.reshape(-1, 4)
        words = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(torch.int16)
        zero = parts.get("zero")
        return make_parts(
            words.view(tiles.blocks, tiles.tiles, COLS, tiles.plane),
            _to_blocks(parts["scale"], tiles),
            None if zero is None else _to_blocks(zero, tiles),
        )

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Packed parts, from those in planes."""
        tiles = _tiling(spec, shape)
        pairs = parts["qdata"].reshape(-1, 1).view(torch.uint8)
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1)
        planes = nibbles.view(tiles.blocks, tiles.tiles, COLS, tiles.plane, 4)
        codes = planes.permute(0, 2, 1, 4, 3).reshape(tiles.blocks * COLS, -1)
        codes = codes[: tiles.n, : tiles.k].contiguous()
        if spec.dtype == "int4":
            codes = codes ^ 8
        zero = parts.get("zero")
        return make_parts(
            pack_bits(codes, 4),
            _from_blocks(parts["scale"], spec, tiles),
            None if zero is None else _from_blocks(zero, spec, tiles),
        )


LAYOUTS = (Plane16(),)


def _tiling(spec: Spec, shape: tuple[int, ...]) -> Tiling:
    n, k = shape
    return tiling(n, k, full_block(spec.block, shape)[-1])


def _pad(matrix: Tensor, rows: int, cols: int) -> Tensor:
    return F.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0]))


def _to_blocks(grid: Tensor, tiles: Tiling) -> Tensor:
    """(N, groups) to (blocks, groups, COLS)."""
    padded = _pad(grid, tiles.blocks * COLS, tiles.groups)
    return padded.view(tiles.blocks, COLS, tiles.groups).transpose(1, 2).contiguous()


def _from_blocks(blocks: Tensor, spec: Spec, tiles: Tiling) -> Tensor:
    groups = -(-tiles.k // spec.block[-1]) if spec.block[-1] != WHOLE else 1
    return blocks.transpose(1, 2).reshape(-1, tiles.groups)[: tiles.n, :groups].contiguous()
