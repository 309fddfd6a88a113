"""Weight-only matmuls; see `ao_kernels.triton.weight_only.layout` for the layout."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ao_kernels.triton.shared.kernel_operands import (
    concat_planes,
    load_scales,
    load_zeros,
    ones_like,
)
from ao_kernels.triton.shared.kernel_prefetch import prefetch, prefetch_tiles
from ao_kernels.triton.shared.kernel_split_k import epilogue
from ao_kernels.triton.weight_only.kernel_codes import k_of, numbers
from ao_kernels.triton.weight_only.kernel_scales import neighbours

#: K of a dot product of several narrow planes
_DOT_K = tl.constexpr(128)
#: N of a tile of the layout
_TILE_N = tl.constexpr(128)


@triton.jit(
    do_not_specialize=["M", "n_tiles", "k_tiles", "tiles_per_split", "splits"],
    do_not_specialize_on_alignment=["bias_ptr", "semaphore_ptr"],
)
def linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    M,
    N,
    K,
    stride_x,
    n_tiles,
    k_tiles,
    tiles_per_split,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    ONES: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
):
    """The matmul x (M, K) @ weight.T + bias: one CTA for BLOCK_M × BLOCK_N of it and a split of K.

    CTAs of neighbouring M read the same weights, and are neighbours: the first dimension of the grid is M,
    the second N, the third splits. Tiles of weights are 128 of N, of which BLOCK_N is a multiple, by PLANES
    planes of PLANE_K each along K, in WORDS words (see `Plane16`, and with SPARSE `Plane24`).
    PLANES_PER_GROUP planes share a scale; 0: one scale per row. The weights are the left operand, which the
    tensor cores take from registers. They hold value - OFFSET. Sums are scaled in float32, and with
    HAS_GLOBAL_SCALE by the global scale too. Scales of 8 bits are in the format SCALE. The zero-point
    correction, (OFFSET - zero) times the activation sum of a group, is added before; tensor cores find that
    sum, as a product with ones.

    ASM and what begins with LOAD are PTX; where ASM is None, the reference path computes the same with plain
    operations, and the values of codes are in `table_ptr`. LOAD_TABLE, where there is one, loads the LUT from
    TABLE on. PREFETCH_TILES tiles are prefetched before the kernel waits for the one in front (PDL).
    """
    m_tile = tl.program_id(0)
    n_block = tl.program_id(1)
    split = tl.program_id(2)
    if PREFETCH_TILES:
        gdc_launch_dependents()
        first = split * tiles_per_split
        TILE: tl.constexpr = WORDS * _TILE_N * PLANE_K
        SCALES: tl.constexpr = _TILE_N * (PLANES // PLANES_PER_GROUP) if PLANES_PER_GROUP else 0
        for half in tl.static_range(BLOCK_N // _TILE_N):
            row = tl.minimum(n_block * (BLOCK_N // _TILE_N) + half, n_tiles - 1)
            prefetch_tiles(w_ptr, row, first, k_tiles, PREFETCH_TILES, TILE, PREFETCH)
            if PLANES_PER_GROUP:
                prefetch_tiles(scale_ptr, row, first, k_tiles, PREFETCH_TILES, SCALES, PREFETCH)
                if HAS_ZERO:
                    prefetch_tiles(zero_ptr, row, first, k_tiles, PREFETCH_TILES, SCALES, PREFETCH)
            else:
                prefetch(scale_ptr + row * _TILE_N, _TILE_N, PREFETCH)
                if HAS_ZERO:
                    prefetch(zero_ptr + row * _TILE_N, _TILE_N, PREFETCH)
        gdc_wait()
    matmul(
        x_ptr, w_ptr, scale_ptr, global_scale_ptr, zero_ptr, table_ptr, bias_ptr, out_ptr,
        partial_ptr, semaphore_ptr,
        m_tile * BLOCK_M, M, n_block, 0, m_tile * tl.num_programs(1) + n_block, split,
        N, K, stride_x, n_tiles, k_tiles, tiles_per_split, splits,
        BLOCK_M, BLOCK_N, WORDS, PLANES, PLANE_K, PLANES_PER_GROUP, OFFSET, ORDER, SPARSE, SPLIT, SCALE,
        HAS_GLOBAL_SCALE, HAS_ZERO, HAS_BIAS, EVEN_K, ASM, ONES, LOAD_SCALE, LOAD_ZERO, LOAD_TABLE, TABLE,
    )  # fmt: skip


@triton.jit
def matmul(
    x_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    row,
    end,
    n_block,
    expert,
    tile_id,
    split,
    N,
    K,
    stride_x,
    n_tiles,
    k_tiles,
    tiles_per_split,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    ONES: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """What one CTA of `linear` computes: BLOCK_M × BLOCK_N, from `row` to `end` along M, and N `n_block`.

    `expert` is the number of the weight, each of `n_tiles` rows of tiles, and `tile_id` that of the output
    tile (see `epilogue`). Scales and zero points of a tile are loaded while the tile before is multiplied.
    """
    offs_m = row + tl.arange(0, BLOCK_M)
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, PLANE_K)
    first = tl.minimum(split * tiles_per_split, k_tiles - 1)
    last = tl.minimum(split * tiles_per_split + tiles_per_split, k_tiles)

    if BLOCK_N == _TILE_N:
        tile_row = expert * n_tiles + n_block
    else:  # of each row; beyond the last tile, that one: nothing of it is stored
        own = n_block * (BLOCK_N // _TILE_N) + tile_n // _TILE_N
        tile_row = expert * n_tiles + tl.minimum(own, n_tiles - 1)
    tile_row = tile_row.to(tl.int64)
    within_n = tile_n % _TILE_N
    GROUPS: tl.constexpr = PLANES // PLANES_PER_GROUP if PLANES_PER_GROUP else 1
    # several narrow planes are one dot product: on sm_90 each product waits for the one before
    PLANES_PER_DOT: tl.constexpr = (
        min(PLANES_PER_GROUP if PLANES_PER_GROUP else PLANES, _DOT_K // PLANE_K)
        if PLANE_K < 64
        else 1
    )
    CHAIN: tl.constexpr = PLANES_PER_GROUP if PLANES_PER_GROUP else PLANES
    k_offsets = tl.arange(0, PLANES_PER_DOT * PLANE_K)
    TILE: tl.constexpr = WORDS * _TILE_N * PLANE_K
    if BLOCK_N == _TILE_N:
        w_at = w_ptr + (tile_row * k_tiles + first) * TILE + within_n[:, None] * PLANE_K
    else:
        w_at = w_ptr + ((tile_row * k_tiles + first) * TILE + within_n * PLANE_K)[:, None]
    # where the scales of the first tile of each row are: of rows of weights, their only ones
    grid = tile_row * k_tiles * (GROUPS * _TILE_N) if PLANES_PER_GROUP else tile_row * _TILE_N
    scale_at = scale_ptr + grid + within_n * (1 if SCALE is None else GROUPS)
    zero_at = zero_ptr + grid + within_n
    x_at = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + first * (PLANES * PLANE_K)
    inside_m = offs_m[None, :] < end

    if LOAD_TABLE is not None:
        copy_at = table_ptr + TABLE + (tl.arange(0, 32) & 1) * 8
        tl.inline_asm_elementwise(
            LOAD_TABLE, "=r,l", [copy_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    PER_TILE: tl.constexpr = GROUPS * _TILE_N if PLANES_PER_GROUP else 0
    by, moved = _scales(
        scale_at + first * PER_TILE, zero_at + first * PER_TILE, GROUPS, SCALE, HAS_ZERO, OFFSET,
        LOAD_SCALE, LOAD_ZERO,
    )  # fmt: skip
    if HAS_ZERO:
        ones = ones_like(PLANES_PER_DOT * PLANE_K, BLOCK_N, x_ptr, ONES)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(first, last):
        planes = numbers(
            w_at,
            tile_k,
            x_ptr,
            table_ptr,
            _TILE_N * PLANE_K,
            WORDS,
            PLANES,
            OFFSET,
            ORDER,
            SPARSE,
            ASM,
        )
        if PLANES_PER_GROUP:
            ahead = tl.minimum(tile + 1, last - 1) * PER_TILE
            next_by, next_moved = _scales(
                scale_at + ahead, zero_at + ahead, GROUPS, SCALE, HAS_ZERO, OFFSET, LOAD_SCALE, LOAD_ZERO,
            )  # fmt: skip
        left = K - tile * (PLANES * PLANE_K)
        for group in tl.static_range(GROUPS):
            part = acc
            if PLANES_PER_GROUP:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if HAS_ZERO:
                sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if PLANES_PER_GROUP else total
            for j in tl.static_range(group * CHAIN, group * CHAIN + CHAIN, PLANES_PER_DOT):
                x = _activations(x_at, j, k_offsets, left, inside_m, PLANE_K, SPARSE, EVEN_K)
                part = tl.dot(concat_planes(planes, j, PLANES_PER_DOT), x, part)
                if HAS_ZERO:
                    sums = tl.dot(ones, x, sums)
            if PLANES_PER_GROUP:
                if HAS_ZERO:
                    part += moved[group][:, None] * sums
                acc += part * by[group][:, None]
            else:
                acc = part
                if HAS_ZERO:
                    total = sums
        if PLANES_PER_GROUP:
            by = next_by
            moved = next_moved
        w_at += TILE
        x_at += PLANES * PLANE_K
    if PLANES_PER_GROUP == 0:
        if HAS_ZERO:
            acc += moved[0][:, None] * total
        acc *= by[0][:, None]
    if HAS_GLOBAL_SCALE:
        acc *= tl.load(global_scale_ptr)

    offs_n = n_block * BLOCK_N + tile_n
    out_at = out_ptr + offs_m[None, :].to(tl.int64) * N + offs_n[:, None]
    stored = inside_m & (offs_n[:, None] < N)
    epilogue(
        acc, out_at, stored, bias_ptr, partial_ptr, semaphore_ptr, split, splits, tile_id, tile_n, offs_n, N,
        BLOCK_M, BLOCK_N, SPLIT, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _scales(
    scale_at, zero_at, GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_ZERO: tl.constexpr,
    OFFSET: tl.constexpr, LOAD_SCALE: tl.constexpr, LOAD_ZERO: tl.constexpr,
):  # fmt: skip
    """The scales of a tile, a tensor for each group, and as many of OFFSET less zero points, or none."""
    by = ()
    if SCALE is None:
        for group in tl.static_range(GROUPS):
            by += (load_scales(scale_at + group * _TILE_N, LOAD_SCALE),)
    else:
        by = neighbours(scale_at, GROUPS, SCALE, LOAD_SCALE)
    moved = ()
    if HAS_ZERO:
        for group in tl.static_range(GROUPS):
            moved += (OFFSET - load_zeros(zero_at + group * _TILE_N, LOAD_ZERO),)
    return by, moved


@triton.jit
def _activations(
    x_at,
    plane,
    k_offsets,
    left,
    inside_m,
    PLANE_K: tl.constexpr,
    SPARSE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One plane's activations, PLANE_K × BLOCK_M; what is outside is 0."""
    k_index = k_of(plane, k_offsets, PLANE_K, SPARSE)[:, None]
    if not EVEN_K:
        inside_m = inside_m & (k_index < left)
    return tl.load(x_at + k_index, mask=inside_m, other=0.0)
