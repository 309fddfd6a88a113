"""Dense values of weights in planes, and rows of them (embeddings)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.weight_only.kernel_codes import k_of, values
from ao_kernels.triton.weight_only.kernel_scales import grid_place, scales


@triton.jit
def dequantize(
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    out_ptr,
    N,
    K,
    k_tiles,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Dense values (N, K), or (E, N, K): (code - zero) * scale in float32, rounded once; one CTA per tile."""
    n_tile = tl.program_id(0)
    tile = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, PLANE_K)
    weight_tile = expert * tl.num_programs(0) + n_tile
    block = weight_tile * k_tiles + tile
    w_at = w_ptr + block * (WORDS * BLOCK_N * PLANE_K) + tile_n[:, None] * PLANE_K
    offs_n = n_tile * BLOCK_N + tile_n
    for j in tl.static_range(PLANES):
        zero_at = zero_ptr + grid_place(
            block, weight_tile, j, tile_n, BLOCK_N, PLANES, PLANES_PER_GROUP, False
        )
        scale_at = scale_ptr + grid_place(
            block, weight_tile, j, tile_n, BLOCK_N, PLANES, PLANES_PER_GROUP, SCALE is not None
        )
        value = values(w_at, tile_k, j, table_ptr, BLOCK_N * PLANE_K, WORDS, PLANES, ORDER, SPARSE)
        if HAS_ZERO:
            value -= tl.load(zero_at).to(tl.float32)[:, None]
        value *= scales(scale_at, global_scale_ptr + expert, SCALE, HAS_GLOBAL_SCALE)[:, None]
        k = tile * (PLANES * PLANE_K) + k_of(j, tile_k, PLANE_K, SPARSE)
        out_at = out_ptr + (expert * N + offs_n)[:, None] * K + k[None, :]
        inside = (offs_n[:, None] < N) & (k[None, :] < K)
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def embedding(
    ids_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    out_ptr,
    count,
    N,
    K,
    k_tiles,
    IDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Rows of a weight, with the values of `dequantize`: one CTA for IDS of them in one tile.

    A row that there is not becomes NaN.
    """
    tile = tl.program_id(1)
    places = tl.program_id(0) * IDS + tl.arange(0, IDS)
    tile_k = tl.arange(0, PLANE_K)
    ids = tl.load(ids_ptr + places, mask=places < count, other=0).to(tl.int64)
    exists = (ids >= 0) & (ids < N)
    ids = tl.where(exists, ids, 0)
    n_tile = ids // BLOCK_N
    offs_n = ids % BLOCK_N
    block = n_tile * k_tiles + tile
    w_at = w_ptr + ((block * (WORDS * BLOCK_N) + offs_n) * PLANE_K)[:, None]
    for j in tl.static_range(PLANES):
        zero_at = zero_ptr + grid_place(
            block, n_tile, j, offs_n, BLOCK_N, PLANES, PLANES_PER_GROUP, False
        )
        scale_at = scale_ptr + grid_place(
            block, n_tile, j, offs_n, BLOCK_N, PLANES, PLANES_PER_GROUP, SCALE is not None
        )
        value = values(w_at, tile_k, j, table_ptr, BLOCK_N * PLANE_K, WORDS, PLANES, ORDER, SPARSE)
        if HAS_ZERO:
            value -= tl.load(zero_at).to(tl.float32)[:, None]
        value *= scales(scale_at, global_scale_ptr, SCALE, HAS_GLOBAL_SCALE)[:, None]
        value = tl.where(exists[:, None], value, float("nan"))
        k = tile * (PLANES * PLANE_K) + k_of(j, tile_k, PLANE_K, SPARSE)
        out_at = out_ptr + places[:, None].to(tl.int64) * K + k[None, :]
        inside = (places < count)[:, None] & (k < K)[None, :]
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)
