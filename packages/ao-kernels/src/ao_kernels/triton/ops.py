"""Custom ops around the launches, so that `torch.compile` and export see one node each."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.registry import registry
from ao_kernels.triton.formats import known
from ao_kernels.triton.launch import constants, regime_of, splits_of
from ao_kernels.triton.plane16 import COLS, Tiling, tiling
from ao_kernels.triton.scales import KINDS
from ao_kernels.triton.support import (
    capability,
    on_device,
    processors,
    rows_of,
    starts_early,
    take_locks,
)

__all__ = ["IDS", "plane16_dequantize", "plane16_embedding", "plane16_linear"]

#: rows of activations, and columns, that a block of `group_sums` adds up at once
_SUM_ROWS, _SUM_STEP = 4, 128
#: rows that a block looks up
IDS = 8


@torch.library.custom_op("ao_kernels::plane16_linear", mutates_args=())
def plane16_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    outer: Tensor | None = None,
) -> Tensor:
    """Activations (…, k) times the transpose of a weight (n, k) in planes, plus bias.

    `numbers` is the name of the weight's format; `sparse`, two of every four columns are kept; `outer` [1]
    is the scale of the scales where they have one.
    """
    return launch_linear(x, qdata, scale, zero, table, bias, n, k, group, numbers, sparse, outer)


@plane16_linear.register_fake
def _(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    outer: Tensor | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@torch.library.custom_op("ao_kernels::plane16_dequantize", mutates_args=())
def plane16_dequantize(
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    outer: Tensor | None = None,
) -> Tensor:
    """Dense values (n, k) of a weight in planes."""
    from ao_kernels.triton.kernels import plane16

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    out = qdata.new_empty((n, k), dtype=dtype)
    with on_device(qdata):
        plane16.dequantize[(tiles.blocks, tiles.tiles)](
            qdata, *_grids(scale, outer, zero), table, out, n, k, tiles.tiles,
            COLS, tiles.planes, tiles.plane, tiles.chain, fmt.order, fmt.sparse,
            KINDS.get(scale.dtype), outer is not None, zero is not None,
        )  # fmt: skip
    return out


@plane16_dequantize.register_fake
def _(
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    outer: Tensor | None = None,
) -> Tensor:
    return qdata.new_empty((n, k), dtype=dtype)


@torch.library.custom_op("ao_kernels::plane16_embedding", mutates_args=())
def plane16_embedding(
    ids: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    outer: Tensor | None = None,
) -> Tensor:
    """Rows (…, k) of a weight (n, k) in planes, for ids (…); NaN for those that there are not."""
    from ao_kernels.triton.kernels import plane16

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    out = qdata.new_empty((*ids.shape, k), dtype=dtype)
    if out.numel() == 0:
        return out
    with on_device(qdata):
        plane16.embedding[(-(-ids.numel() // IDS), tiles.tiles)](
            ids.contiguous(), qdata, *_grids(scale, outer, zero), table, out,
            ids.numel(), n, k, tiles.tiles, IDS, COLS, tiles.planes, tiles.plane, tiles.chain,
            fmt.order, fmt.sparse, KINDS.get(scale.dtype), outer is not None, zero is not None,
        )  # fmt: skip
    return out


@plane16_embedding.register_fake
def _(
    ids: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    sparse: bool = False,
    outer: Tensor | None = None,
) -> Tensor:
    return qdata.new_empty((*ids.shape, k), dtype=dtype)


def launch_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
    numbers: str,
    sparse: bool = False,
    outer: Tensor | None = None,
    *,
    splits: int | None = None,
) -> Tensor:
    """The op itself; `splits` sets how many blocks share a row of tiles."""
    from ao_kernels.triton.kernels import plane16

    x_MK = rows_of(x, k)
    m, out = x_MK.shape[0], x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return out
    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles, regime = tiling(n, k, group, fmt), regime_of(m)
    row_blocks = -(-m // regime.rows)
    if splits is None:
        splits = splits_of(tiles, row_blocks, processors(x.device))
    places, early = tiles.blocks * row_blocks, starts_early(x.device)
    with on_device(x):
        sums = out if zero is None else _group_sums(x_MK, tiles, group)
        # scratch that a product without it does not touch; any tensor can stand there
        partial = locks = out
        if splits > 1:
            partial = x.new_empty(places * splits * COLS * regime.rows, dtype=torch.float32)
            locks = take_locks(places, x.device)
        plane16.linear[(tiles.blocks, splits, row_blocks)](
            x_MK, qdata, *_grids(scale, outer, zero), table, sums,
            out if bias is None else bias, out, partial, locks,
            m, n, k, x_MK.stride(0), m, tiles.tiles, -(-tiles.tiles // splits),
            **constants(
                fmt, tiles, regime, splits, x.dtype, scale.dtype,
                None if zero is None else zero.dtype, bias is not None, assembly=x.is_cuda,
                early=early, outer=outer is not None, sm80=capability(x.device) < (8, 9),
            ),
            num_warps=regime.num_warps, num_stages=regime.num_stages,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


def _grids(
    scale: Tensor, outer: Tensor | None, zero: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What kernels take of scales and zero points; any tensor can stand where there is none."""
    by = scale.view(torch.uint8) if scale.dtype in KINDS else scale
    return by, by if outer is None else outer, by if zero is None else zero


def _group_sums(x_MK: Tensor, tiles: Tiling, group: int) -> Tensor:
    """float32 (groups, M): sums of the activations that share a zero point."""
    from ao_kernels.triton.kernels import plane16

    m, k = x_MK.shape
    sums = x_MK.new_empty((tiles.groups, m), dtype=torch.float32)
    plane16.group_sums[(-(-m // _SUM_ROWS), tiles.groups)](
        x_MK, sums, m, k, x_MK.stride(0), m, group if tiles.chain else k, _SUM_ROWS, _SUM_STEP
    )
    return sums
