"""The layout `bsr_sorted` and its product: only blocks that are stored are read and multiplied."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout, Parts
from ao_core.records import Call, DType, Kernel
from ao_core.registry import registry
from ao_core.spec import Spec, blocksize_of
from ao_core.tensor import QTensor
from ao_kernels.triton.launch import Regime, Setting, settings_around
from ao_kernels.triton.support import on_device, processors, rows_of, scratch, why_not
from ao_kernels.triton.tuning.choose import Case, choose
from ao_kernels.triton.tuning.records import Problem, bucket

__all__ = [
    "BSR_KERNELS",
    "BSR_LAYOUTS",
    "SIDES",
    "BsrSorted",
    "bsr_linear",
    "order_of",
    "regime_of",
    "settings",
]

#: sides of the blocks that the kernel takes
SIDES = (16, 32, 64)
#: blocks of a row that each of several programs gets at least
_FEWEST_BLOCKS = 8


def regime_of(m: int, side: int, dtype: torch.dtype) -> Regime:
    """The smallest regime that takes m rows at once, or the largest.

    In float32 a thread holds three times as much, so there rows are 64 at most.
    """
    wide = dtype == torch.float32
    rows = 16 if m <= 16 else 64 if m <= 64 or wide else 128
    if side == 64:
        return Regime(rows, 4, 3 if wide else 6 if rows == 16 else 5)
    return Regime(rows, max(1, side * rows // (512 if wide else 1024)), 3 if wide else 4)


def splits_of(side: int, programs: int, blocks: int, rows: int, most: int) -> int:
    """Among how many programs a row of blocks is split, so that every processor has one."""
    splits = 1
    while (
        splits < 8
        and programs * splits < 0.9 * most
        and blocks * side >= 2 * splits * _FEWEST_BLOCKS * 64 * rows
    ):
        splits *= 2
    return splits


def rule(side: int, m: int, dtype: torch.dtype, blocks: int, rows: int, most: int) -> Setting:
    """What serves m rows of activations and `blocks` blocks in so many rows where nothing was measured."""
    regime = regime_of(m, side, dtype)
    programs = rows * -(-m // regime.rows)
    return Setting(*regime, splits_of(side, programs, blocks, rows, most))


def settings_of(
    side: int, m: int, dtype: torch.dtype, blocks: int, rows: int, most: int
) -> tuple[Setting, ...]:
    """What may serve any numbers of rows and blocks whose buckets are those of m and `blocks`."""
    first = rule(side, bucket(m), dtype, bucket(blocks), rows, most)
    return settings_around(first, bucket(blocks) * side // (_FEWEST_BLOCKS * 64 * rows))


@lru_cache(maxsize=4096)
def case_of(
    side: int, m: int, dtype: torch.dtype, blocks: int, n: int, k: int, device: torch.device
) -> Case[Setting]:
    """What settings are chosen for: m rows of activations, and a weight (n, k) of so many blocks."""
    sizes = (side, m, dtype, blocks, -(-n // side), processors(device))
    problem = Problem("bsr_linear", (side, dtype, bucket(blocks)), n, k, bucket(m))
    return Case(problem, device, rule(*sizes), lambda: settings_of(*sizes))


def settings(
    side: int, regime: Regime, splits: int, dtype: torch.dtype, *, bias: bool, even: bool
) -> dict[str, Any]:
    """The compile-time arguments of the kernel `linear`; float32 is three products of TF32."""
    return {
        "SIDE": side,
        "AT_ONCE": max(1, (32 if dtype == torch.float32 else 64) // side),
        "ROWS": regime.rows,
        "SPLITS": splits,
        "HAS_BIAS": bias,
        "EVEN_K": even,
        "PRECISION": "tf32x3",
    }


def order_of(crow_indices: Tensor) -> Tensor:
    """int32: the rows of blocks, the longest first, so that no long one is left for the end."""
    lengths = crow_indices[1:] - crow_indices[:-1]
    return lengths.argsort(descending=True, stable=True).to(torch.int32)


@torch.library.custom_op("ao_kernels::bsr_linear", mutates_args=())
def bsr_linear(
    x: Tensor,
    blocks: Tensor,
    col_indices: Tensor,
    crow_indices: Tensor,
    order: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
) -> Tensor:
    """Activations (…, k) times the transpose of a block-sparse weight (n, k), plus bias.

    `blocks` (nnz, side, side) in the dtype of x, `col_indices` int32 (nnz,), `crow_indices` and `order`
    int32, (ceil(n / side) + 1,) and one less.
    """
    return launch(x, blocks, col_indices, crow_indices, order, bias, n, k)


@bsr_linear.register_fake
def _(
    x: Tensor,
    blocks: Tensor,
    col_indices: Tensor,
    crow_indices: Tensor,
    order: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


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
    splits: int | None = None,
    regime: Regime | None = None,
) -> Tensor:
    """The op itself; `splits`, and with it `regime`, set how many share a row of blocks, and which."""
    from ao_kernels.triton.kernels import bsr

    x_MK = rows_of(x, k)
    m, out = x_MK.shape[0], x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return out
    side, block_rows = blocks.shape[-1], len(order)
    if splits is None:
        setting = choose(
            case_of(side, m, x.dtype, len(blocks), n, k, x.device),
            lambda each: launch(
                x, blocks, col_indices, crow_indices, order, bias, n, k,
                splits=each.splits, regime=each.regime,
            ),
        )  # fmt: skip
        splits, regime = setting.splits, setting.regime
    regime = regime or regime_of(m, side, x.dtype)
    row_tiles = -(-m // regime.rows)
    programs = block_rows * row_tiles
    with on_device(x):
        partial, locks = scratch(out, programs, splits, side * regime.rows)
        bsr.linear[(block_rows, splits, row_tiles)](
            x_MK, blocks, col_indices, crow_indices, order, out if bias is None else bias, out,
            partial, locks, m, n, k, x_MK.stride(0),
            **settings(side, regime, splits, x.dtype, bias=bias is not None, even=k % side == 0),
            num_warps=regime.num_warps, num_stages=regime.num_stages,
        )  # fmt: skip
    return out


class BsrSorted(Layout):
    """As `bsr`, and beside it the order in which products begin with the rows of blocks.

    - qdata, col_indices, crow_indices: as in `bsr`, of dense values
    - row_order: int32 (ceil(N / b),), the longest row first.
    """

    name = "bsr_sorted"
    canonical = False
    canonical_name = "bsr"
    auto_devices = ("cuda",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the product cannot take such a tensor."""
        if dtype.kind != "dense":
            return f"holds bf16, fp16 and fp32, not {dtype.name}"
        if len(shape) != 2 or 0 in shape:
            return f"needs a weight of 2 dimensions that is not empty, found {shape}"
        if blocksize_of(spec) not in SIDES:
            return f"needs blocks of {SIDES} rows, found blocksize={blocksize_of(spec)}"
        return None if spec.act is None else "its product does not quantize activations"

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """With the order of rows."""
        return {**parts, "row_order": order_of(parts["crow_indices"])}

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Without it."""
        return {name: part for name, part in parts.items() if name != "row_order"}


BSR_LAYOUTS = (BsrSorted(),)


def linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """The product, in one launch."""
    parts, (n, k) = w.parts, w.stored_shape
    out: Tensor = bsr_linear(
        x,
        parts["qdata"],
        parts["col_indices"],
        parts["crow_indices"],
        parts["row_order"],
        bias,
        n,
        k,
    )
    return out


def _refuses(call: Call) -> str | None:
    stored = registry.dtypes.get(call.spec.dtype).storage
    if call.x_dtype != stored:
        return f"needs activations in the dtype of the weight, {stored}, found {call.x_dtype}"
    return None


def _describe(call: Call) -> str:
    regime = regime_of(call.m, blocksize_of(call.spec), call.x_dtype)
    return f"blocks of {regime.rows} rows, sums in float32, empty blocks skipped, splits by their number"


BSR_KERNELS = (
    Kernel(
        "triton_bsr_sorted_linear", "linear", "bsr_sorted", "cuda", linear, 50, why_not, _refuses,
        _describe,
    ),
)  # fmt: skip
