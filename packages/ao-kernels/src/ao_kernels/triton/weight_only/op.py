"""Custom ops around the launches, so that `torch.compile` and export see one node each."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.registry import registry
from ao_kernels.triton.shared.activation_sums import group_sums
from ao_kernels.triton.shared.device import on_device, starts_early
from ao_kernels.triton.shared.tile_config import Regime, zero_kind
from ao_kernels.triton.shared.tiling import COLS
from ao_kernels.triton.shared.workspace import rows_of, scratch
from ao_kernels.triton.tuning.choose import choose
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import ahead, arguments, case_of, regime_of
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

#: rows that a block looks up
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
    outer: Tensor | None = None,
) -> Tensor:
    """Activations (…, k) times the transpose of a weight (n, k) in planes, plus bias.

    `numbers` is the name of the weight's format; `sparse`, two of every four columns are kept; `outer` [1]
    is the scale of the scales where they have one.
    """
    return launch_linear(
        x, qdata, scale, zero_point, table, bias, n, k, group, numbers, sparse, outer
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
    outer: Tensor | None = None,
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
    outer: Tensor | None = None,
) -> Tensor:
    """Dense values (n, k), or (experts, n, k), of a weight in planes."""
    from ao_kernels.triton.weight_only import kernel_dequantize

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    experts = scale.shape[:-3]
    out = qdata.new_empty((*experts, n, k), dtype=dtype)
    with on_device(qdata):
        kernel_dequantize.dequantize[(tiles.blocks, tiles.tiles, experts.numel())](
            qdata, *grids(scale, outer, zero_point), table, out, n, k, tiles.tiles,
            COLS, fmt.words, tiles.planes, tiles.plane, tiles.chain, fmt.order, fmt.sparse,
            KINDS.get(scale.dtype), outer is not None, zero_point is not None,
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
    outer: Tensor | None = None,
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
    outer: Tensor | None = None,
) -> Tensor:
    """Rows (…, k) of a weight (n, k) in planes, for ids (…); NaN for those that there are not."""
    from ao_kernels.triton.weight_only import kernel_dequantize

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    out = qdata.new_empty((*ids.shape, k), dtype=dtype)
    if out.numel() == 0:
        return out
    with on_device(qdata):
        kernel_dequantize.embedding[(-(-ids.numel() // IDS), tiles.tiles)](
            ids.contiguous(), qdata, *grids(scale, outer, zero_point), table, out,
            ids.numel(), n, k, tiles.tiles, IDS, COLS, fmt.words, tiles.planes, tiles.plane,
            tiles.chain, fmt.order, fmt.sparse, KINDS.get(scale.dtype), outer is not None,
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
    outer: Tensor | None = None,
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
    outer: Tensor | None = None,
    *,
    splits: int | None = None,
    regime: Regime | None = None,
) -> Tensor:
    """The op itself; `splits`, and with it `regime`, set how many blocks share a row of tiles, and which."""
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
                numbers, tiles, group, x.dtype, name_of(scale.dtype, outer=outer is not None),
                zero_kind(zero_point), m, x.device, sparse=sparse,
            ),
            lambda each: launch_linear(
                x, qdata, scale, zero_point, table, bias, n, k, group, numbers, sparse, outer,
                splits=each.splits, regime=each.regime,
            ),
        )  # fmt: skip
        splits, regime = setting.splits, setting.regime
    regime = regime or regime_of(m)
    row_blocks = -(-m // regime.rows)
    places, early = tiles.blocks * row_blocks, starts_early(x.device)
    with on_device(x):
        sums = (
            out if zero_point is None else group_sums(x_MK, tiles, group, row_blocks * regime.rows)
        )
        partial, locks = scratch(out, places, splits, COLS * regime.rows)
        kernel.linear[(tiles.blocks, splits, row_blocks)](
            x_MK, qdata, *grids(scale, outer, zero_point), table, sums,
            out if bias is None else bias, out, partial, locks,
            m, n, k, x_MK.stride(0), sums.stride(0), tiles.tiles, -(-tiles.tiles // splits),
            **arguments(
                x, fmt, tiles, regime, splits, scale, zero_point, outer, bias=bias is not None, early=early
            ),
            **ahead(regime, early=early),
        )  # fmt: skip
    return out


def grids(
    scale: Tensor, outer: Tensor | None, zero_point: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What kernels take of scales and zero points; any tensor can stand where there is none."""
    by = scale.view(torch.uint8) if scale.dtype in KINDS else scale
    return by, by if outer is None else outer, by if zero_point is None else zero_point
