"""How a weight is cut into tiles, and its scales into blocks of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ao_core.spec import WHOLE, Spec

__all__ = ["COLS", "Tiling", "from_blocks", "pad", "to_blocks"]

#: rows of a weight in a tile: columns of a product
COLS = 128


class Tiling(NamedTuple):
    """How a matrix of n rows and k columns is cut up."""

    n: int
    k: int
    #: planes of a tile, columns of each
    planes: int
    plane: int
    #: planes that share a scale; 0: all of a row does
    chain: int
    #: blocks of `COLS` rows, tiles in each
    blocks: int
    tiles: int

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.planes * self.plane

    @property
    def beside(self) -> int:
        """Scales of a row in a tile, or 1 for all of it."""
        return self.planes // self.chain if self.chain else 1

    @property
    def groups(self) -> int:
        """Scales of a row, those of padding included."""
        return self.tiles * self.planes // self.chain if self.chain else 1


def pad(matrix: Tensor, rows: int, cols: int, value: int = 0) -> Tensor:
    """A matrix of so many rows and columns."""
    return F.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0]), value=value)


def to_blocks(grid: Tensor, tiles: Tiling) -> Tensor:
    """Scales (N, groups) as (blocks, groups, COLS)."""
    padded = pad(grid, tiles.blocks * COLS, tiles.groups)
    return padded.view(tiles.blocks, COLS, tiles.groups).transpose(1, 2).contiguous()


def from_blocks(blocks: Tensor, spec: Spec, tiles: Tiling) -> Tensor:
    """Inverse of `to_blocks`."""
    groups = -(-tiles.k // spec.block[-1]) if spec.block[-1] != WHOLE else 1
    return blocks.transpose(1, 2).reshape(-1, tiles.groups)[: tiles.n, :groups].contiguous()
