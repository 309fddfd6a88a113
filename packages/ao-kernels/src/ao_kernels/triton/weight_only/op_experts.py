"""Matmuls with the weights of experts in planes: one launch for all, and nobody waits for the offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext import registry
from ao_kernels.triton.shared.device import on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.tile_config import LaunchConfig, splits_of
from ao_kernels.triton.shared.tiling import Tiling
from ao_kernels.triton.shared.workspace import rows_of, split_k_workspace
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import arguments, tile_config_of
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.op import grids

__all__ = [
    "ends_of",
    "groups_of",
    "launch",
    "launch_config_for",
    "most_m_tiles",
    "plane16_grouped_linear",
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


def launch_config_for(
    tiles: Tiling, m: int, experts: int, sm_count: int, *, zero_point: bool
) -> LaunchConfig:
    """The tile of the rows that an expert has on average; splits for the most M tiles there can be."""
    config = tile_config_of(-(-m // experts), zero_point=zero_point)
    output_tiles = most_m_tiles(m, experts, config.block_m) * -(-tiles.n // config.block_n)
    return LaunchConfig(config, splits_of(output_tiles, tiles.k_tiles, config.num_warps, sm_count))


def most_m_tiles(m: int, experts: int, rows: int) -> int:
    """The most tiles of `rows` rows that m rows can take, where each expert's begin anew, and the rest's."""
    begun = min(m, experts + 1)
    return begun + (m - begun) // rows


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
    setting: LaunchConfig | None = None,
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
        setting: for tests, how to launch.
    """
    from ao_kernels.triton.weight_only import kernel_experts

    x = rows_of(x, k)
    m, experts = x.shape[0], offs.shape[0]
    out = x.new_empty((m, n))
    if m == 0:
        return out
    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    config, splits = setting or launch_config_for(
        tiles, m, experts, sm_count(x.device), zero_point=zero_point is not None
    )
    m_tiles, n_blocks = most_m_tiles(m, experts, config.block_m), -(-n // config.block_n)
    pdl = supports_pdl(x.device)
    with on_device(x):
        partial, semaphores = split_k_workspace(
            out, m_tiles * n_blocks, splits, config.block_n * config.block_m
        )
        kernel_experts.linear[(m_tiles, n_blocks, splits)](
            x, qdata, *grids(scale, global_scale, zero_point), table, offs.contiguous(),
            out, partial, semaphores,
            m, n, k, experts, x.stride(0), tiles.n_tiles, tiles.k_tiles, -(-tiles.k_tiles // splits), splits,
            **arguments(
                x, fmt, tiles, config, splits, scale, zero_point, global_scale, bias=False, pdl=pdl
            ),
            GROUPS=groups_of(experts), PDL=pdl,
        )  # fmt: skip
    return out


plane16_grouped_linear = define(
    "plane16_grouped_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? zero_point, Tensor table, "
    "Tensor offs, SymInt n, SymInt k, SymInt group, str numbers, bool sparse=False, "
    "Tensor? global_scale=None) -> Tensor",
    launch,
    lambda x, qdata, scale, zero_point, table, offs, n, *_: x.new_empty((x.shape[0], n)),
)
