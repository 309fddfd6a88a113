"""Products with the weights of experts in planes: one launch for all, and nobody waits for the offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.registry import registry
from ao_kernels.triton.shared.activation_sums import group_sums
from ao_kernels.triton.shared.device import on_device, processors, starts_early
from ao_kernels.triton.shared.tile_config import Regime, splits_of
from ao_kernels.triton.shared.tiling import COLS
from ao_kernels.triton.shared.workspace import rows_of, scratch
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import arguments, regime_of
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.op import grids

__all__ = ["ends_of", "groups_of", "launch", "plane16_grouped_linear", "regime_for", "row_tiles"]


def ends_of(x: Tensor, offs: Tensor | None) -> Tensor:
    """int32 (E,), the row after each expert's last: `offs`, or those of a batch x (E, M, K)."""
    if offs is not None:
        return offs
    experts, m = x.shape[:2]
    return torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * m


def groups_of(experts: int) -> int:
    """A power of two above the number of experts: so many offsets a block reads at once."""
    return 1 << experts.bit_length()


def regime_for(m: int, experts: int) -> Regime:
    """That of the rows an expert has on average."""
    return regime_of(-(-m // experts))


def row_tiles(m: int, experts: int, rows: int) -> int:
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
    outer: Tensor | None = None,
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
        outer: float32 (E, 1), what all scales of a weight are multiplied by, or None.
    """
    return launch(x, qdata, scale, zero_point, table, offs, n, k, group, numbers, sparse, outer)


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
    outer: Tensor | None = None,
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
    outer: Tensor | None = None,
    *,
    splits: int | None = None,
    regime: Regime | None = None,
) -> Tensor:
    """The op itself; `splits` and `regime` set what follows from sizes and the device."""
    from ao_kernels.triton.weight_only import kernel_experts

    x, m, experts = rows_of(x, k), x.shape[0], len(offs)
    out = x.new_empty((m, n))
    if m == 0:
        return out
    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(n, k, group, fmt)
    if regime is None:
        regime = regime_for(m, experts)
    row_blocks = row_tiles(m, experts, regime.rows)
    if splits is None:
        splits = splits_of(tiles, row_blocks, processors(x.device))
    places, early = tiles.blocks * row_blocks, starts_early(x.device)
    with on_device(x):
        sums = (
            out
            if zero_point is None
            else group_sums(x, tiles, group, -(-m // 16) * 16 + regime.rows)
        )
        partial, locks = scratch(out, places, splits, COLS * regime.rows)
        kernel_experts.linear[(tiles.blocks, splits, row_blocks)](
            x, qdata, *grids(scale, outer, zero_point), table, sums, offs.contiguous(),
            out, partial, locks,
            m, n, k, experts, x.stride(0), sums.stride(0), tiles.tiles, -(-tiles.tiles // splits),
            **arguments(
                x, fmt, tiles, regime, splits, scale, zero_point, outer, bias=False, early=early
            ),
            GROUPS=groups_of(experts), EARLY=early,
        )  # fmt: skip
    return out
