"""The launch of matmuls with the layout `bsr_sorted`: only stored blocks are read and multiplied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_kernels.triton.shared.device import on_device, sm_count
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.tile_config import LaunchConfig, TileConfig
from ao_kernels.triton.shared.workspace import rows_of, split_k_workspace

__all__ = [
    "bsr_linear",
    "launch",
    "launch_config_of",
    "settings",
    "tile_config_of",
]

#: blocks of a row that each of several CTAs gets at least
_FEWEST_BLOCKS = 8


def tile_config_of(m: int, side: int, dtype: torch.dtype) -> TileConfig:
    """The smallest that takes m rows at once, or the largest.

    In float32 a thread holds three times as much, so there rows are 64 at most.
    """
    wide = dtype == torch.float32
    rows = 16 if m <= 16 else 64 if m <= 64 or wide else 128
    if side == 64:
        return TileConfig(rows, 4, 3 if wide else 6 if rows == 16 else 5)
    return TileConfig(rows, max(1, side * rows // (512 if wide else 1024)), 3 if wide else 4)


def splits_of(side: int, programs: int, blocks: int, rows: int, most: int) -> int:
    """The number of splits of a row of blocks that gives every SM a CTA."""
    splits = 1
    while (
        splits < 8
        and programs * splits < 0.9 * most
        and blocks * side >= 2 * splits * _FEWEST_BLOCKS * 64 * rows
    ):
        splits *= 2
    return splits


def launch_config_of(
    side: int, m: int, dtype: torch.dtype, blocks: int, rows: int, most: int
) -> LaunchConfig:
    """What serves m rows of activations and `blocks` blocks in so many rows."""
    config = tile_config_of(m, side, dtype)
    programs = rows * -(-m // config.block_m)
    return LaunchConfig(config, splits_of(side, programs, blocks, rows, most))


def settings(
    side: int, config: TileConfig, splits: int, dtype: torch.dtype, *, bias: bool, even: bool
) -> dict[str, Any]:
    """The compile-time arguments of the kernel `linear`; float32 is three matmuls of TF32."""
    return {
        "SIDE": side,
        "BLOCKS_PER_DOT": max(1, (32 if dtype == torch.float32 else 64) // side),
        "BLOCK_M": config.block_m,
        "SPLIT": splits > 1,
        "HAS_BIAS": bias,
        "EVEN_K": even,
        "PRECISION": "tf32x3",
    }


def launch(
    x: Tensor,
    blocks: Tensor,
    col_indices: Tensor,
    crow_indices: Tensor,
    order: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    *,
    setting: LaunchConfig | None = None,
) -> Tensor:
    """Activations (…, k) times the transpose of a block-sparse weight (n, k), plus bias.

    `blocks` (nnz, side, side) in the dtype of x, `col_indices` int32 (nnz,), `crow_indices` and `order`
    int32, (ceil(n / side) + 1,) and one less. `setting` is for tests: how to launch.
    """
    from ao_kernels.triton.bsr import kernel

    x_MK = rows_of(x, k)
    m, out = x_MK.shape[0], x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return out
    side, block_rows = blocks.shape[-1], len(order)
    config, splits = setting or launch_config_of(
        side, m, x.dtype, len(blocks), block_rows, sm_count(x.device)
    )
    m_tiles = -(-m // config.block_m)
    with on_device(x):
        partial, semaphores = split_k_workspace(
            out, block_rows * m_tiles, splits, side * config.block_m
        )
        kernel.linear[(block_rows, splits, m_tiles)](
            x_MK, blocks, col_indices, crow_indices, order, out if bias is None else bias.contiguous(), out,
            partial, semaphores, m, n, k, x_MK.stride(0), splits,
            **settings(side, config, splits, x.dtype, bias=bias is not None, even=k % side == 0),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


bsr_linear = define(
    "bsr_linear(Tensor x, Tensor blocks, Tensor col_indices, Tensor crow_indices, Tensor order, "
    "Tensor? bias, SymInt n, SymInt k) -> Tensor",
    launch,
    lambda x, blocks, col_indices, crow_indices, order, bias, n, k: x.new_empty((*x.shape[:-1], n)),
)
