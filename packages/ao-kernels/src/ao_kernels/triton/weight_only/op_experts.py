"""Matmuls with the weights of experts in planes: one launch for all, and nobody waits for the offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext import registry
from ao_kernels.triton.shared.activation_sums import activation_sums
from ao_kernels.triton.shared.device import on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.tile_config import TileConfig, splits_of
from ao_kernels.triton.shared.tiling import BLOCK_N
from ao_kernels.triton.shared.workspace import rows_of, split_k_workspace
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import arguments, tile_config_of
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.op import grids

__all__ = [
    "ends_of",
    "groups_of",
    "launch",
    "most_m_tiles",
    "plane16_grouped_linear",
    "tile_config_for",
]


def ends_of(x: Tensor, offs: Tensor | None) -> Tensor:
    """int32 (E,), the row after each expert's last: `offs`, or those of a batch x (E, M, K)."""
    if offs is not None:
        return offs
    experts, m = x.shape[:2]
    return torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * m


def groups_of(experts: int) -> int:
    """A power of two above the number of experts: so many offsets a CTA reads at once."""
    return 1 << experts.bit_length()


def tile_config_for(m: int, experts: int) -> TileConfig:
    """That of the rows an expert has on average."""
    return tile_config_of(-(-m // experts))


def most_m_tiles(m: int, experts: int, rows: int) -> int:
    """The most tiles of `rows` rows that m rows can take, where each expert's begin anew, and the rest's."""
    begun = min(m, experts + 1)
    return begun + (m - begun) // rows


@torch.library.custom_op("ao_kernels::plane16_grouped_linear", mutates_args=())
def plane16_grouped_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    offs: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Rows x (M, k) times the transpose of their expert's weight, of those (E, n, k) in planes: (M, n).

    Args:
        x: bfloat16 or float16.
        qdata: as `Plane16` describes, with E in front; so `scale`, `zero_point` and `table`.
        scale: of the weight.
        zero_point: of the weight, or None.
        table: of the weight; that of the first expert is read.
        offs: int32 (E,), the row of x after each expert's last. Rows from offs[-1] on become 0; where
            offsets decrease or exceed M, what comes out is undefined, as nobody waits to look at them.
        n: rows of a weight.
        k: columns of a weight.
        group: columns that share a scale.
        numbers: the name of the weight's format.
        sparse: two of every four columns are kept.
        global_scale: float32 (E, 1), what all scales of a weight are multiplied by, or None.
    """
    return launch(
        x, qdata, scale, zero_point, table, offs, n, k, group, numbers, sparse, global_scale
    )


@plane16_grouped_linear.register_fake
def _(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    offs: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], n))


def launch(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    offs: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    global_scale: Tensor | None = None,
    *,
    splits: int | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """The op itself; `splits` and `config` set what follows from sizes and the device."""
    from ao_kernels.triton.weight_only import kernel_experts

    x, m, experts = rows_of(x, k), x.shape[0], len(offs)
    out = x.new_empty((m, n))
    if m == 0:
        return out
    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    if config is None:
        config = tile_config_for(m, experts)
    m_tiles = most_m_tiles(m, experts, config.block_m)
    if splits is None:
        splits = splits_of(tiles, m_tiles, sm_count(x.device))
    output_tiles, pdl = tiles.n_tiles * m_tiles, supports_pdl(x.device)
    with on_device(x):
        sums = (
            out
            if zero_point is None
            else activation_sums(x, tiles, group, -(-m // 16) * 16 + config.block_m)
        )
        partial, semaphores = split_k_workspace(out, output_tiles, splits, BLOCK_N * config.block_m)
        kernel_experts.linear[(tiles.n_tiles, splits, m_tiles)](
            x, qdata, *grids(scale, global_scale, zero_point), table, sums, offs.contiguous(),
            out, partial, semaphores,
            m, n, k, experts, x.stride(0), sums.stride(0), tiles.k_tiles, -(-tiles.k_tiles // splits),
            **arguments(
                x, fmt, tiles, config, splits, scale, zero_point, global_scale, bias=False, pdl=pdl
            ),
            GROUPS=groups_of(experts), PDL=pdl,
        )  # fmt: skip
    return out
