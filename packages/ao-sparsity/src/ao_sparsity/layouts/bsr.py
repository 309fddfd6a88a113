"""`bsr`: square blocks, of which those that are not all zeros are stored (block sparse rows)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core.ext import (
    BLOCKSIZE,
    Geometry,
    Parts,
    UnsupportedOp,
    blocksize_of,
    forms_of,
    make_parts,
    unlike,
)
from ao_sparsity.layouts.base import (
    SparseLayout,
    filled,
    packed_codes,
    unpacked_codes,
    zero_codes,
)
from ao_sparsity.masks import best_blocks, block_scores, spread_blocks

if TYPE_CHECKING:
    from ao_core import DType, Spec

__all__ = ["Bsr"]

#: rows and columns of a block, at most
_LARGEST = 4096


class Bsr(SparseLayout):
    """The blocks of a tensor that are not all zeros.

    Parts, for a tensor (…, N, K), with b = the option "blocksize", NB = ceil(N / b), KB = ceil(K / b):

    - qdata: (nnz, b, b) the nonempty blocks, by row and then column, in the storage dtype, or
      (nnz, b, bytes of b packed codes) where they have less than 8 bits
    - col_indices: int32 (nnz,), the column, counted in blocks, of each
    - crow_indices: int32 (rows + 1,), the first block of each row of blocks, and nnz. There are NB rows for
      each matrix, one matrix after the other
    - scale, zero: as for dense values.

    The edges are padded with zeros. With the option "sparsity", that share of the blocks of each
    matrix is removed: those of the smallest L2 norm, rounded to a whole number. At least one block stays.
    """

    name = "bsr"
    options = ("blocksize", "sparsity")

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if len(shape) < 2:
            return f"shape {shape}: blocks of rows and columns need two dimensions"
        side, gone = spec.option("blocksize", BLOCKSIZE), spec.option("sparsity", 0.0)
        if type(side) is not int or not 1 <= side <= _LARGEST:
            return f"blocksize={side!r}: need a whole number, blocksize >= 1 and <= {_LARGEST}"
        if isinstance(gone, (bool, str)) or not 0 <= gone <= 1:
            return f"sparsity={gone!r}: need a number, 0 <= sparsity <= 1"
        return super().refuses(spec, shape, dtype)

    def sparsify(self, values: Tensor, spec: Spec) -> Tensor:
        block = (blocksize_of(spec),) * 2
        scores = block_scores(values, block)
        kept = best_blocks(scores, _gone(tuple(values.shape), spec)) & (scores != 0)
        return torch.where(spread_blocks(kept, block, values.shape), values, 0)

    def sparsity(self, parts: Parts, spec: Spec, shape: tuple[int, ...]) -> float | None:
        blocks = prod(_grid(shape, blocksize_of(spec)))
        return 1 - len(parts["qdata"]) / blocks if blocks else None

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        b, shape = blocksize_of(spec), tuple(codes.shape)
        zeros = zero_codes(codes, zero_point, spec, shape, dtype)
        codes, zeros = (_tiles(each, b) for each in filled(codes, zeros, {-2: b, -1: b}))
        stored = (codes != zeros).flatten(-2).any(-1)
        first = torch.cat([stored.new_zeros(1, dtype=torch.int64), stored.sum(1).cumsum(0)])
        if stored.is_meta:  # which blocks hold something is not known: as many as there can be
            most = stored.numel() - prod(shape[:-2]) * _gone(shape, spec)
            kept, columns = codes.flatten(0, 1)[:most], first.new_empty(most)
        else:
            kept, columns = codes[stored], stored.nonzero()[:, 1]
        return make_parts(packed_codes(kept, dtype), scale, zero_point) | {
            "col_indices": columns.to(torch.int32),
            "crow_indices": first.to(torch.int32),
        }

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        b, zero_point = blocksize_of(spec), parts.get("zero_point")
        rows, columns = _grid(shape, b)
        blocks = unpacked_codes(parts["qdata"], b, dtype)
        zeros = zero_codes(blocks, zero_point, spec, shape, dtype)
        tiles = _tiles(filled(zeros, zeros, {-2: b, -1: b})[0], b)
        # the row of a block: how many rows end at it or before; a tensor of zeros has no such row
        which = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)
        row = torch.searchsorted(parts["crow_indices"][1:], which, right=True).clamp(
            max=max(rows - 1, 0)
        )
        tiles = tiles.clone(memory_format=torch.contiguous_format)
        tiles = tiles.index_put((row, parts["col_indices"].long()), blocks)
        lead, n, k = shape[:-2], shape[-2], shape[-1]
        dense = tiles.reshape(*lead, rows // max(prod(lead), 1), columns, b, b).transpose(-3, -2)
        codes = dense.flatten(-4, -3).flatten(-2)[..., :n, :k]
        return codes.contiguous(), parts.get("scale"), zero_point

    def check_parts(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> str | None:
        # how many blocks there are, values decide: as many as there are places for them
        count = len(parts["col_indices"]) if "col_indices" in parts else 0
        forms = {
            name: form._replace(shape=(count, *form.shape[1:]))
            if name in ("qdata", "col_indices")
            else form
            for name, form in forms_of(self, spec, shape, dtype).items()
        }
        if reason := unlike(parts, forms):
            return reason
        first = parts["crow_indices"].long()
        if (int(first[0]), int(first[-1])) != (0, count) or bool((first.diff() < 0).any()):
            return f"crow_indices must rise from 0 to {count}, the number of its blocks"
        _, columns = _grid(shape, blocksize_of(spec))
        column = parts["col_indices"].long()
        if count and not 0 <= int(column.min()) <= int(column.max()) < columns:
            return f"col_indices must be from 0 to {columns - 1}"
        row = torch.repeat_interleave(first.diff())
        if bool(((row * columns + column).diff() <= 0).any()):
            return "col_indices must rise along each row of blocks"
        return None

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        raise UnsupportedOp(
            "how many blocks a range of rows or columns has is decided by values, so it has no place that is "
            "known beforehand; call .dequantize() first"
        )


def _gone(shape: tuple[int, ...], spec: Spec) -> int:
    """How many blocks of each matrix are to go."""
    blocks = prod(_grid(shape[-2:], blocksize_of(spec)))
    return min(round(float(spec.option("sparsity", 0.0)) * blocks), max(blocks - 1, 0))


def _grid(shape: tuple[int, ...], b: int) -> tuple[int, int]:
    """Rows of blocks, of all matrices, and columns."""
    return prod(shape[:-2]) * -(-shape[-2] // b), -(-shape[-1] // b)


def _tiles(padded: Tensor, b: int) -> Tensor:
    """(…, N, K) of whole blocks as (rows of blocks, columns of blocks, b, b)."""
    *lead, n, k = padded.shape
    tiles = padded.reshape(*lead, n // b, b, k // b, b).transpose(-3, -2)
    return tiles.reshape(prod(lead) * (n // b), k // b, b, b)
