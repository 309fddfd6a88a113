"""Sums of activations per group, for the zero-point correction: a launch before the matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_kernels.triton.shared.tiling import Tiling

__all__ = ["activation_sums"]

#: M and K that a CTA adds up at once
_BLOCK_M, _BLOCK_K = 4, 128


def activation_sums(x_MK: Tensor, tiles: Tiling, group: int, rows: int) -> Tensor:
    """float32 (groups, rows): sums of the activations of each group; 0 in rows from M on."""
    from ao_kernels.triton.shared import kernel_activation_sums as kernel

    m, k = x_MK.shape
    sums = x_MK.new_empty((tiles.groups, rows), dtype=torch.float32)
    kernel.activation_sums[(-(-rows // _BLOCK_M), tiles.groups)](
        x_MK,
        sums,
        m,
        k,
        x_MK.stride(0),
        rows,
        group if tiles.planes_per_group else k,
        _BLOCK_M,
        _BLOCK_K,
    )
    return sums
