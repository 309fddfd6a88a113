"""Sums of activations that share a zero point: what products with zero points launch beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_kernels.triton.shared.tiling import Tiling

__all__ = ["group_sums"]

#: rows of activations, and columns, that a block adds up at once
_ROWS, _STEP = 4, 128


def group_sums(x_MK: Tensor, tiles: Tiling, group: int, rows: int) -> Tensor:
    """float32 (groups, rows), 0 after those of x: sums of the activations that share a zero point."""
    from ao_kernels.triton.shared import kernel_activation_sums as kernel

    m, k = x_MK.shape
    sums = x_MK.new_empty((tiles.groups, rows), dtype=torch.float32)
    kernel.group_sums[(-(-rows // _ROWS), tiles.groups)](
        x_MK, sums, m, k, x_MK.stride(0), rows, group if tiles.chain else k, _ROWS, _STEP
    )
    return sums
