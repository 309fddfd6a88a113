"""How a weight (N, K) is cut into tiles, and its scales into blocks along N."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Spec

__all__ = ["BLOCK_N", "Tiling", "from_blocks", "pad", "to_blocks"]

#: N of a tile: rows of the weight, which are columns of the matmul
BLOCK_N = 128


class Tiling(NamedTuple):
    """How a weight of n rows (output features) and k columns (input features) is cut up."""

    n: int
    k: int
    #: planes of a tile: slices along K; K of a plane
    planes: int
    plane_k: int
    #: planes that share a scale; 0: one scale per row
    planes_per_group: int
    #: tiles along N, of `BLOCK_N` each, and along K
    n_tiles: int
    k_tiles: int

    @property
    def width(self) -> int:
        """K of a tile."""
        return self.planes * self.plane_k

    @property
    def groups_per_tile(self) -> int:
        """Scales per row of a tile; 1 where a scale is for all of a row."""
        return self.planes // self.planes_per_group if self.planes_per_group else 1

    @property
    def groups(self) -> int:
        """Scales per row, those of padding included."""
        if not self.planes_per_group:
            return 1
        return self.k_tiles * self.planes // self.planes_per_group


def pad(matrix: Tensor, rows: int, cols: int, value: int = 0) -> Tensor:
    """A matrix of so many rows and columns."""
    return F.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0]), value=value)


def to_blocks(grid: Tensor, tiles: Tiling) -> Tensor:
    """Scales (N, groups) as (n_tiles, groups, BLOCK_N)."""
    padded = pad(grid, tiles.n_tiles * BLOCK_N, tiles.groups)
    return padded.view(tiles.n_tiles, BLOCK_N, tiles.groups).transpose(1, 2).contiguous()


def from_blocks(blocks: Tensor, spec: Spec, tiles: Tiling) -> Tensor:
    """Inverse of `to_blocks`."""
    groups = -(-tiles.k // spec.block[-1]) if spec.block[-1] != WHOLE else 1
    return blocks.transpose(1, 2).reshape(-1, tiles.groups)[: tiles.n, :groups].contiguous()
