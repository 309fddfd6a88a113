"""Products of activations with the weights of experts in planes; see `ao_kernels.triton.weight_only.layout`."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ao_kernels.triton.shared.kernel_offsets import find
from ao_kernels.triton.weight_only.kernel import product


@triton.jit(do_not_specialize=["M", "experts", "tiles", "tiles_a_split"])
def linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    table_ptr,
    sums_ptr,
    offs_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    M,
    N,
    K,
    experts,
    stride_x,
    stride_sums,
    tiles,
    tiles_a_split,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`plane16.linear` for the rows of each expert, sorted: those up to offs[e] meet the e-th weight.

    The tiles of one expert's weights follow those of another's. GROUPS is a power of two above the number of
    experts. Rows that no expert has become 0. With EARLY, the kernel after this may start at once. So may
    this, but it has to wait for the offsets, which say what weights there are to bring nearer.
    """
    col_tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tile = tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, end, expert = find(offs_ptr, row_tile, M, experts, ROWS, GROUPS)
    if expert < experts:
        product(
            x_ptr, w_ptr, scale_ptr, outer_ptr + expert, zero_ptr, table_ptr, sums_ptr, x_ptr, out_ptr,
            partial_ptr, lock_ptr,
            row, end, col_tile, expert * tl.num_programs(0) + col_tile,
            row_tile * tl.num_programs(0) + col_tile, split,
            N, K, stride_x, stride_sums, tiles, tiles_a_split,
            ROWS, COLS, WORDS, PLANES, PLANE, CHAIN, OFFSET, ORDER, SPARSE, SPLITS, SCALE,
            HAS_OUTER, HAS_ZERO, HAS_BIAS, EVEN_K, ASM, LOAD_SCALE, LOAD_ZERO, LOAD_TABLE, TABLE,
        )  # fmt: skip
    elif split == 0:
        rows = row + tl.arange(0, ROWS)[:, None]
        cols = col_tile * COLS + tl.arange(0, COLS)[None, :]
        none = tl.zeros((ROWS, COLS), out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows.to(tl.int64) * N + cols, none, mask=(rows < end) & (cols < N))
