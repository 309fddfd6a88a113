"""The layout `plane24`: 2:4 sparse weights in int4 as the Triton matmuls read them, a tile in a piece."""

from __future__ import annotations

import torch

from ao_core import DType, Spec
from ao_core.ext import Parts, make_parts
from ao_core.ext.numerics import pack_bits, unpack_bits
from ao_kernels.triton.shared.tiling import BLOCK_N, pad
from ao_kernels.triton.shared.workspace import prepare
from ao_kernels.triton.weight_only.layout import Plane16, from_scales, known_tiles, to_scales
from ao_kernels.triton.weight_only.sparse_ptx import PATTERNS

__all__ = ["Plane24"]

#: the index of `two_four`, both places in two bits, → the number of the pattern; others do not occur
_PATTERN_OF = [0] * 16
for _number, (_first, _second) in enumerate(PATTERNS):
    _PATTERN_OF[_first | _second << 2] = _number


class Plane24(Plane16):
    """For a weight (…, N, K) of which two of every four columns are kept: tiles of 128 rows and 256 columns.

    A row of a tile has 64 groups of four columns: group 8u + q is the u-th of pair q of 16-bit words. In
    all pairs together lie three numbers of 32 bits: the codes of groups u = 0 to 3, of 4 to 7, and eight
    patterns. So each pair holds two neighbouring columns of either half of eight groups, in runs of 32
    columns: what a matmul takes of the activations are pairs of neighbours. Parts:

    - qdata: int16 […, N / 128, tiles, 3, 128, 16]. Of u = 4h + 2w + r the codes, in offset binary, are bits
      4w and up, and 8 + 4w and up, of word 2q + r of the h-th number; of u = 2t + r the pattern is bits 4t
      and up of word 2q + r of the third: 0 to 5 for columns 01, 02, 03, 12, 13, 23.
    - scale, table: as in `Plane16`.

    Rows and columns of padding have code 0 and scale 0.
    """

    name = "plane24"
    canonical_name = "two_four"
    sparse = True

    def sparsity(self, parts: Parts, spec: Spec, shape: tuple[int, ...]) -> float | None:
        """The share of elements that are not stored."""
        return max(1 - 2 * -(-shape[-1] // 4) / shape[-1], 0.0)

    def pack_matrix(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Parts in planes of a weight (N, K)."""
        fmt, tiles = known_tiles(spec, shape, dtype, sparse=True)
        groups = -(-tiles.k // 4)
        codes = unpack_bits(parts["qdata"].view(torch.uint8), 4, 2 * groups) ^ fmt.flip
        index = unpack_bits(parts["index"], 4, groups)
        patterns = index.new_tensor(_PATTERN_OF)[index.long()]
        rows, columns = tiles.n_tiles * BLOCK_N, tiles.k_tiles * tiles.width // 4
        # padding has the code that no matmul sees, that of 0
        codes = pad(codes ^ fmt.flip, rows, 2 * columns) ^ fmt.flip
        cut = (tiles.n_tiles, BLOCK_N, tiles.k_tiles)
        # blocks, rows, tiles, h, w, r, q, first or second
        by_word = codes.view(*cut, 2, 2, 2, 8, 2).permute(0, 2, 3, 1, 6, 5, 7, 4)
        # blocks, rows, tiles, t, r, q
        of_patterns = pad(patterns, rows, columns).view(*cut, 4, 2, 8).permute(0, 2, 1, 5, 4, 3)
        words = [
            pack_bits(each.reshape(-1, 4), 4).view(torch.int16) for each in (by_word, of_patterns)
        ]
        places = (tiles.n_tiles, tiles.k_tiles, -1, BLOCK_N, tiles.plane_k)
        qdata = torch.cat([each.view(places) for each in words], 2)
        prepare(qdata.device)
        return {
            "qdata": qdata,
            **to_scales(parts["scale"], tiles),
            "table": fmt.table().to(qdata.device),
        }

    def unpack_matrix(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Canonical parts of a weight (N, K)."""
        fmt, tiles = known_tiles(spec, shape, dtype, sparse=True)
        groups, rows = -(-tiles.k // 4), tiles.n_tiles * BLOCK_N
        nibbles = unpack_bits(parts["qdata"].unsqueeze(-1).view(torch.uint8), 4, 4)
        cut = (tiles.n_tiles, tiles.k_tiles)
        by_word = (
            nibbles[:, :, :2].reshape(*cut, 2, BLOCK_N, 8, 2, 2, 2).permute(0, 3, 1, 2, 7, 5, 4, 6)
        )
        codes = by_word.reshape(rows, -1)[: tiles.n, : 2 * groups].contiguous() ^ fmt.flip
        of_patterns = nibbles[:, :, 2].reshape(*cut, BLOCK_N, 8, 2, 4).permute(0, 2, 1, 5, 4, 3)
        patterns = of_patterns.reshape(rows, -1)[: tiles.n, :groups].contiguous()
        places = patterns.new_tensor([first | second << 2 for first, second in PATTERNS])
        index = pad(places[patterns.long()], tiles.n, groups + groups % 2, 0b0100)
        packed = pack_bits(codes, 4)
        scale = from_scales(parts, spec, tiles)
        return make_parts(packed, scale, None) | {"index": pack_bits(index, 4)}
