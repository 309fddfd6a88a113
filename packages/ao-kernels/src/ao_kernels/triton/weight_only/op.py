"""Custom ops around the launches, so that `torch.compile` and export see one node each."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext import registry
from ao_kernels.triton.shared.activation_sums import activation_sums
from ao_kernels.triton.shared.device import on_device, supports_pdl
from ao_kernels.triton.shared.tile_config import TileConfig, zero_kind
from ao_kernels.triton.shared.tiling import BLOCK_N
from ao_kernels.triton.shared.workspace import rows_of, split_k_workspace
from ao_kernels.triton.tuning.choose import choose
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import (
    arguments,
    case_of,
    prefetch_options,
    tile_config_of,
)
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.scales import KINDS, name_of

__all__ = [
    "IDS",
    "grids",
    "launch_linear",
    "plane16_dequantize",
    "plane16_embedding",
    "plane16_linear",
]

#: rows that a CTA looks up
IDS = 8


@torch.library.custom_op("ao_kernels::plane16_linear", mutates_args=())
def plane16_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Activations (…, k) times the transpose of a weight (n, k) in planes, plus bias.

    `numbers` is the name of the weight's format; `sparse`, two of every four along K are kept;
    `global_scale` [1] is the second-level scale (double quantization), where there is one.
    """
    return launch_linear(
        x, qdata, scale, zero_point, table, bias, n, k, group, numbers, sparse, global_scale
    )


@plane16_linear.register_fake
def _(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@torch.library.custom_op("ao_kernels::plane16_dequantize", mutates_args=())
def plane16_dequantize(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Dense values (n, k), or (experts, n, k), of a weight in planes."""
    from ao_kernels.triton.weight_only import kernel_dequantize

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    experts = scale.shape[:-3]
    out = qdata.new_empty((*experts, n, k), dtype=dtype)
    with on_device(qdata):
        kernel_dequantize.dequantize[(tiles.n_tiles, tiles.k_tiles, experts.numel())](
            qdata, *grids(scale, global_scale, zero_point), table, out, n, k, tiles.k_tiles,
            BLOCK_N, fmt.words, tiles.planes, tiles.plane_k, tiles.planes_per_group, fmt.order, fmt.sparse,
            KINDS.get(scale.dtype), global_scale is not None, zero_point is not None,
        )  # fmt: skip
    return out


@plane16_dequantize.register_fake
def _(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    return qdata.new_empty((*scale.shape[:-3], n, k), dtype=dtype)


@torch.library.custom_op("ao_kernels::plane16_embedding", mutates_args=())
def plane16_embedding(
    ids: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Rows (…, k) of a weight (n, k) in planes, for ids (…); NaN for those that there are not."""
    from ao_kernels.triton.weight_only import kernel_dequantize

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    out = qdata.new_empty((*ids.shape, k), dtype=dtype)
    if out.numel() == 0:
        return out
    with on_device(qdata):
        kernel_dequantize.embedding[(-(-ids.numel() // IDS), tiles.k_tiles)](
            ids.contiguous(), qdata, *grids(scale, global_scale, zero_point), table, out,
            ids.numel(), n, k, tiles.k_tiles, IDS, BLOCK_N, fmt.words, tiles.planes, tiles.plane_k,
            tiles.planes_per_group, fmt.order, fmt.sparse, KINDS.get(scale.dtype), global_scale is not None,
            zero_point is not None,
        )  # fmt: skip
    return out


@plane16_embedding.register_fake
def _(
    ids: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    return qdata.new_empty((*ids.shape, k), dtype=dtype)


def launch_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
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
    """The op itself; `splits`, and with it `config`, set how many blocks share a row of tiles, and which."""
    from ao_kernels.triton.weight_only import kernel

    x_MK = rows_of(x, k)
    m, out = x_MK.shape[0], x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return out
    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    if splits is None:
        setting = choose(
            case_of(
                numbers, tiles, group, x.dtype, name_of(scale.dtype, global_scale=global_scale is not None),
                zero_kind(zero_point), m, x.device, sparse=sparse,
            ),
            lambda each: launch_linear(
                x, qdata, scale, zero_point, table, bias, n, k, group, numbers, sparse, global_scale,
                splits=each.splits, config=each.config,
            ),
        )  # fmt: skip
        splits, config = setting.splits, setting.config
    config = config or tile_config_of(m)
    m_tiles = -(-m // config.block_m)
    output_tiles, pdl = tiles.n_tiles * m_tiles, supports_pdl(x.device)
    with on_device(x):
        sums = (
            out
            if zero_point is None
            else activation_sums(x_MK, tiles, group, m_tiles * config.block_m)
        )
        partial, semaphores = split_k_workspace(out, output_tiles, splits, BLOCK_N * config.block_m)
        kernel.linear[(tiles.n_tiles, splits, m_tiles)](
            x_MK, qdata, *grids(scale, global_scale, zero_point), table, sums,
            out if bias is None else bias, out, partial, semaphores,
            m, n, k, x_MK.stride(0), sums.stride(0), tiles.k_tiles, -(-tiles.k_tiles // splits),
            **arguments(
                x, fmt, tiles, config, splits, scale, zero_point, global_scale, bias=bias is not None, pdl=pdl
            ),
            **prefetch_options(config, pdl=pdl),
        )  # fmt: skip
    return out


def grids(
    scale: Tensor, global_scale: Tensor | None, zero_point: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What kernels take of scales and zero points; any tensor can stand where there is none."""
    by = scale.view(torch.uint8) if scale.dtype in KINDS else scale
    return (
        by,
        by if global_scale is None else global_scale,
        by if zero_point is None else zero_point,
    )
