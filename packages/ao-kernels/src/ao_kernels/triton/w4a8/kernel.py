"""W4A8: matmuls of activations in 8 bits with weights in 4; see `ao_kernels.triton.w4a8.layout`."""

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


@triton.jit(
    do_not_specialize=["M", "k_tiles", "tiles_per_split", "splits"],
    do_not_specialize_on_alignment=["x_scale_ptr", "x_zero_ptr", "bias_ptr", "semaphore_ptr"],
)
def linear(
    x_ptr,
    x_scale_ptr,
    x_zero_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    row_sums_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    M,
    N,
    K,
    stride_x,
    k_tiles,
    tiles_per_split,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_X_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    ONES: tl.constexpr,
    TO_FLOAT: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
):
    """The matmul x (M, K) @ weight.T + bias: one CTA for BLOCK_M × BLOCK_N of it and a split of K.

    The first dimension of the grid is M, the second N, the third splits. `x_ptr` has codes, int8 or float8,
    with row scales; with HAS_X_ZERO those are uint8 codes less 128, and rows have zero points.
    PLANES_PER_GROUP planes share a scale of the weight; 0: one scale per row. The weights are the left
    operand, which the tensor cores take from registers, as (value - OFFSET) / FACTOR. The correction by
    zero points of weights takes the activation sums of each group, which are a product with ones.

    ASM, ONES, TO_FLOAT and what begins with LOAD are PTX; where one is None, the reference path uses plain
    operations. PREFETCH_TILES is the prefetch distance before the kernel waits for the one in front (PDL).
    """
    m_tile = tl.program_id(0)
    n_tile = tl.program_id(1)
    split = tl.program_id(2)
    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, PLANE_K)
    first = tl.minimum(split * tiles_per_split, k_tiles - 1)
    last = tl.minimum(split * tiles_per_split + tiles_per_split, k_tiles)

    INTEGERS: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    PLANES_PER_DOT: tl.constexpr = PLANES_PER_GROUP if PLANES_PER_GROUP else PLANES
    GROUPS: tl.constexpr = PLANES // PLANES_PER_DOT
    PER_TILE: tl.constexpr = GROUPS * BLOCK_N if PLANES_PER_GROUP else 0
    if PREFETCH_TILES:
        gdc_launch_dependents()
        prefetch_tiles(w_ptr, n_tile, first, k_tiles, PREFETCH_TILES, BLOCK_N * PLANE_K, PREFETCH)
        if PLANES_PER_GROUP:
            prefetch_tiles(scale_ptr, n_tile, first, k_tiles, PREFETCH_TILES, PER_TILE, PREFETCH)
            if HAS_ZERO:
                prefetch_tiles(zero_ptr, n_tile, first, k_tiles, PREFETCH_TILES, PER_TILE, PREFETCH)
        else:
            prefetch(scale_ptr + n_tile * BLOCK_N, BLOCK_N, PREFETCH)
            if HAS_ZERO:
                prefetch(zero_ptr + n_tile * BLOCK_N, BLOCK_N, PREFETCH)
        gdc_wait()
    block = n_tile.to(tl.int64) * k_tiles + first
    grid = n_tile.to(tl.int64) * k_tiles * PER_TILE if PLANES_PER_GROUP else n_tile * BLOCK_N
    k_offsets = tl.arange(0, PLANES_PER_DOT * PLANE_K)
    w_at = w_ptr + block * (BLOCK_N * PLANE_K) + tile_n[:, None] * PLANE_K
    scale_at = scale_ptr + grid + tile_n
    zero_at = zero_ptr + grid + tile_n
    x_at = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + first * (PLANES * PLANE_K)
    inside_m = offs_m[None, :] < M

    if HAS_ZERO:
        ones = ones_like(PLANES_PER_DOT * PLANE_K, BLOCK_N, x_ptr, ONES)
        all_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INTEGERS else tl.float32)
    acc = tl.zeros(
        (BLOCK_N, BLOCK_M), tl.int32 if INTEGERS and PLANES_PER_GROUP == 0 else tl.float32
    )
    by, moved = _scales(
        scale_at + first * PER_TILE, zero_at + first * PER_TILE, GROUPS, BLOCK_N, HAS_ZERO, OFFSET, FACTOR,
        LOAD_SCALE, LOAD_ZERO,
    )  # fmt: skip
    for tile in range(first, last):
        # codes that have no zero points are signed
        planes = _numbers(w_at, tile_k, x_ptr, PLANES, not HAS_ZERO, ASM)
        left = K - tile * (PLANES * PLANE_K)
        if PLANES_PER_GROUP:
            ahead = tl.minimum(tile + 1, last - 1) * PER_TILE
            next_by, next_moved = _scales(
                scale_at + ahead, zero_at + ahead, GROUPS, BLOCK_N, HAS_ZERO, OFFSET, FACTOR, LOAD_SCALE,
                LOAD_ZERO,
            )  # fmt: skip
        for group in tl.static_range(GROUPS):
            k_index = (group * PLANES_PER_DOT * PLANE_K + k_offsets)[:, None]
            x = tl.load(
                x_at + k_index, mask=inside_m if EVEN_K else inside_m & (k_index < left), other=0.0
            )
            w = concat_planes(planes, group * PLANES_PER_DOT, PLANES_PER_DOT)
            if PLANES_PER_GROUP == 0 and INTEGERS:
                acc = tl.dot(w, x, acc, out_dtype=tl.int32)
                if HAS_ZERO:
                    all_sums = tl.dot(ones, x, all_sums, out_dtype=tl.int32)
            elif PLANES_PER_GROUP == 0:
                acc += tl.dot(w, x)
                if HAS_ZERO:
                    all_sums += tl.dot(ones, x)
            else:
                part = _matmuls(w, x, INTEGERS, TO_FLOAT)
                if HAS_ZERO:
                    part += moved[group][:, None] * _matmuls(ones, x, INTEGERS, TO_FLOAT)
                acc += part * by[group][:, None]
        if PLANES_PER_GROUP:
            by = next_by
            moved = next_moved
        w_at += BLOCK_N * PLANE_K
        x_at += PLANES * PLANE_K
    total = acc.to(tl.float32)
    if PLANES_PER_GROUP == 0:
        if HAS_ZERO:
            total += moved[0][:, None] * all_sums.to(tl.float32)
        total *= by[0][:, None]
    total *= FACTOR

    offs_n = n_tile * BLOCK_N + tile_n
    if HAS_X_ZERO:
        # the sums are those of whole rows, which one split adds
        x_zero = tl.load(x_zero_ptr + offs_m, mask=(offs_m < M) & (split == 0), other=128)
        x_zero = x_zero.to(tl.float32) - 128.0
        total -= tl.load(row_sums_ptr + offs_n)[:, None] * x_zero[None, :]
    total *= tl.load(x_scale_ptr + offs_m, mask=offs_m < M, other=0.0)[None, :]

    out_at = out_ptr + offs_m[None, :].to(tl.int64) * N + offs_n[:, None]
    inside = inside_m & (offs_n[:, None] < N)
    at = m_tile * tl.num_programs(1) + n_tile
    epilogue(
        total, out_at, inside, bias_ptr, partial_ptr, semaphore_ptr, split, splits, at, tile_n, offs_n, N,
        BLOCK_M, BLOCK_N, SPLIT, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _scales(
    scale_at, zero_at, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_ZERO: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, LOAD_SCALE: tl.constexpr, LOAD_ZERO: tl.constexpr,
):  # fmt: skip
    """The scales of a tile, a tensor for each group: loaded while the tile before is multiplied.

    And as many of what takes zero points off numbers that are (value - OFFSET) / FACTOR, or none.
    """
    by, moved = (), ()
    for group in tl.static_range(GROUPS):
        by += (load_scales(scale_at + group * BLOCK_N, LOAD_SCALE),)
        if HAS_ZERO:
            zero_point = load_zeros(zero_at + group * BLOCK_N, LOAD_ZERO)
            moved += ((OFFSET - zero_point) * (1.0 / FACTOR),)
    return by, moved


@triton.jit
def _numbers(w_at, tile_k, x_ptr, PLANES: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """A tensor for each plane of a tile, in the type of the activations."""
    element = x_ptr.dtype.element_ty
    if ASM is None:
        planes = ()
        for j in tl.static_range(PLANES):
            # the word of four neighbouring columns, and a byte for each of them
            words = tl.load(w_at + (tile_k // 4 * 4 + j // 2)[None, :])
            codes = words >> (tile_k % 4 * 8 + j % 2 * 4)[None, :]
            if element == tl.int8:
                numbers = (codes << 4).to(tl.int8)
            else:
                numbers = _small_floats(codes, SIGNED).to(element, bitcast=True)
            planes += (numbers,)
    else:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [tl.load(w_at + tile_k[None, :])],
            dtype=(element,) * 8,
            is_pure=True,
            pack=4,
        )
    return planes


@triton.jit
def _small_floats(codes, SIGNED: tl.constexpr):
    """The bits of e4m3 that `assembly.lower_nibbles` and `signed_nibbles` give."""
    bits = codes & 15
    if SIGNED:
        bits = (codes & 7) + (codes >> 3 & 1) * 129
    return bits.to(tl.uint8)


@triton.jit
def _matmuls(w, x, INTEGERS: tl.constexpr, TO_FLOAT: tl.constexpr):
    """The sums of a group in float32; a text converts them where the converter is slow."""
    if not INTEGERS:
        part = tl.dot(w, x)
    elif TO_FLOAT is None:
        part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
    else:
        part = tl.inline_asm_elementwise(
            TO_FLOAT,
            "=r,r",
            [tl.dot(w, x, out_dtype=tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return part
