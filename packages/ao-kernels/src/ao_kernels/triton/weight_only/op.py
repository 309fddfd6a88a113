"""Custom ops around the launches, so that `torch.compile` and export see one node each."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext import registry
from ao_kernels.triton.shared.device import on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.tile_config import LaunchConfig
from ao_kernels.triton.shared.tiling import BLOCK_N
from ao_kernels.triton.shared.workspace import rows_of, split_k_workspace
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import arguments, launch_config_of, prefetch_options
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.scales import KINDS

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
    setting: LaunchConfig | None = None,
) -> Tensor:
    """Activations (…, k) times the transpose of a weight (n, k) in planes, plus bias.

    `numbers` is the name of the weight's format; `sparse`, two of every four along K are kept;
    `global_scale` [1] is the second-level scale (double quantization), where there is one. `setting` is for
    tests: how to launch.
    """
    from ao_kernels.triton.weight_only import kernel

    x_MK = rows_of(x, k)
    m, out = x_MK.shape[0], x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return out
    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    config, splits = setting or launch_config_of(
        tiles, m, sm_count(x.device), zero_point=zero_point is not None
    )
    m_tiles, n_blocks = -(-m // config.block_m), -(-n // config.block_n)
    pdl = supports_pdl(x.device)
    with on_device(x):
        partial, semaphores = split_k_workspace(
            out, m_tiles * n_blocks, splits, config.block_n * config.block_m
        )
        kernel.linear[(m_tiles, n_blocks, splits)](
            x_MK, qdata, *grids(scale, global_scale, zero_point), table,
            out if bias is None else bias.contiguous(), out, partial, semaphores,
            m, n, k, x_MK.stride(0), tiles.n_tiles, tiles.k_tiles, -(-tiles.k_tiles // splits), splits,
            **arguments(
                x, fmt, tiles, config, splits, scale, zero_point, global_scale, bias=bias is not None, pdl=pdl
            ),
            **prefetch_options(config, pdl=pdl),
        )  # fmt: skip
    return out


def _dequantize(
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


def _embedding(
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


_PARTS = "Tensor qdata, Tensor scale, Tensor? zero_point, Tensor table"
_SIZES = "SymInt n, SymInt k, SymInt group, str numbers"
_MORE = "bool sparse=False, Tensor? global_scale=None) -> Tensor"

plane16_linear = define(
    f"plane16_linear(Tensor x, {_PARTS}, Tensor? bias, {_SIZES}, {_MORE}",
    launch_linear,
    lambda x, qdata, scale, zero_point, table, bias, n, *_: x.new_empty((*x.shape[:-1], n)),
)
plane16_dequantize = define(
    f"plane16_dequantize({_PARTS}, {_SIZES}, ScalarType dtype, {_MORE}",
    _dequantize,
    lambda qdata, scale, zero_point, table, n, k, group, numbers, dtype, *_: qdata.new_empty(
        (*scale.shape[:-3], n, k), dtype=dtype
    ),
)
plane16_embedding = define(
    f"plane16_embedding(Tensor ids, {_PARTS}, {_SIZES}, ScalarType dtype, {_MORE}",
    _embedding,
    lambda ids, qdata, scale, zero_point, table, n, k, group, numbers, dtype, *_: qdata.new_empty(
        (*ids.shape, k), dtype=dtype
    ),
)
