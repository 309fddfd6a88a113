"""Dense values of weights in planes, and rows of them (embeddings)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.weight_only.kernel_codes import column, values
from ao_kernels.triton.weight_only.kernel_scales import grid_place, scales


@triton.jit
def dequantize(
    w_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    table_ptr,
    out_ptr,
    N,
    K,
    tiles,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Dense values (N, K), or (E, N, K): (code - zero) * scale in float32, rounded once; one block a tile."""
    col_tile = tl.program_id(0)
    tile = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    cols = tl.arange(0, COLS)
    inner = tl.arange(0, PLANE)
    weight_tile = expert * tl.num_programs(0) + col_tile
    block = weight_tile * tiles + tile
    row_at = w_ptr + block * (WORDS * COLS * PLANE) + cols[:, None] * PLANE
    col = col_tile * COLS + cols
    for j in tl.static_range(PLANES):
        zero_at = zero_ptr + grid_place(block, weight_tile, j, cols, COLS, PLANES, CHAIN, False)
        scale_at = scale_ptr + grid_place(
            block, weight_tile, j, cols, COLS, PLANES, CHAIN, SCALE is not None
        )
        value = values(row_at, inner, j, table_ptr, COLS, WORDS, PLANES, ORDER, SPARSE)
        if HAS_ZERO:
            value -= tl.load(zero_at).to(tl.float32)[:, None]
        value *= scales(scale_at, outer_ptr + expert, SCALE, HAS_OUTER)[:, None]
        k = tile * (PLANES * PLANE) + column(j, inner, PLANE, SPARSE)
        out_at = out_ptr + (expert * N + col)[:, None] * K + k[None, :]
        inside = (col[:, None] < N) & (k[None, :] < K)
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def embedding(
    ids_ptr,
    w_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    table_ptr,
    out_ptr,
    count,
    N,
    K,
    tiles,
    IDS: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Rows of a weight, with the values of `dequantize`: one block for IDS of them in one tile.

    A row that there is not becomes NaN.
    """
    tile = tl.program_id(1)
    places = tl.program_id(0) * IDS + tl.arange(0, IDS)
    inner = tl.arange(0, PLANE)
    ids = tl.load(ids_ptr + places, mask=places < count, other=0).to(tl.int64)
    exists = (ids >= 0) & (ids < N)
    ids = tl.where(exists, ids, 0)
    col_tile = ids // COLS
    col = ids % COLS
    block = col_tile * tiles + tile
    row_at = w_ptr + ((block * (WORDS * COLS) + col) * PLANE)[:, None]
    for j in tl.static_range(PLANES):
        zero_at = zero_ptr + grid_place(block, col_tile, j, col, COLS, PLANES, CHAIN, False)
        scale_at = scale_ptr + grid_place(
            block, col_tile, j, col, COLS, PLANES, CHAIN, SCALE is not None
        )
        value = values(row_at, inner, j, table_ptr, COLS, WORDS, PLANES, ORDER, SPARSE)
        if HAS_ZERO:
            value -= tl.load(zero_at).to(tl.float32)[:, None]
        value *= scales(scale_at, outer_ptr, SCALE, HAS_OUTER)[:, None]
        value = tl.where(exists[:, None], value, float("nan"))
        k = tile * (PLANES * PLANE) + column(j, inner, PLANE, SPARSE)
        out_at = out_ptr + places[:, None].to(tl.int64) * K + k[None, :]
        inside = (places < count)[:, None] & (k < K)[None, :]
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)
