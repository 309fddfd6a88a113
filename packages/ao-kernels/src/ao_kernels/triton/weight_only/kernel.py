"""Weight-only matmuls; see `ao_kernels.triton.weight_only.layout` for the layout."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_operands import concat_planes, load_scales
from ao_kernels.triton.shared.kernel_prefetch import prefetch_weights
from ao_kernels.triton.shared.kernel_split_k import epilogue
from ao_kernels.triton.weight_only.kernel_codes import k_of, numbers
from ao_kernels.triton.weight_only.kernel_scales import neighbours

#: K of a dot product of several narrow planes
_DOT_K = tl.constexpr(128)


@triton.jit(do_not_specialize=["M", "k_tiles", "tiles_per_split"])
def linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    sums_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    M,
    N,
    K,
    stride_x,
    stride_sums,
    k_tiles,
    tiles_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
):
    """The matmul x (M, K) @ weight.T + bias: one CTA for BLOCK_M × BLOCK_N of it and a split of K.

    A tile of weights is BLOCK_N of N by PLANES planes of PLANE_K each along K, in WORDS words (see
    `Plane16`, and with SPARSE `Plane24`). PLANES_PER_GROUP planes share a scale; 0: one scale per row. The
    weights are the left operand, which the tensor cores take from registers. They hold value -
    OFFSET. Sums are scaled in float32, and with HAS_GLOBAL_SCALE by the global scale too. Scales of 8 bits
    are in the format SCALE. The zero-point correction, (OFFSET - zero) times the activation sum of a
    group, from `sums_ptr` (groups, stride_sums), is added before; rows of a tile that do not exist get it
    too, to no effect.

    ASM and what begins with LOAD are PTX; where ASM is None, the reference path computes the same with plain
    operations, and the values of codes are in `table_ptr`. LOAD_TABLE, where there is one, loads the LUT from
    TABLE on. PREFETCH_TILES is the prefetch distance before the kernel waits for the one in front (PDL).
    """
    n_tile = tl.program_id(0)
    split = tl.program_id(1)
    m_tile = tl.program_id(2)
    if PREFETCH_TILES:
        prefetch_weights(
            w_ptr,
            n_tile,
            split,
            k_tiles,
            tiles_per_split,
            WORDS,
            BLOCK_N * PLANE_K,
            PREFETCH,
            PREFETCH_TILES,
        )
    matmul(
        x_ptr, w_ptr, scale_ptr, global_scale_ptr, zero_ptr, table_ptr, sums_ptr, bias_ptr, out_ptr,
        partial_ptr, semaphore_ptr,
        m_tile * BLOCK_M, M, n_tile, n_tile, m_tile * tl.num_programs(0) + n_tile, split,
        N, K, stride_x, stride_sums, k_tiles, tiles_per_split,
        BLOCK_M, BLOCK_N, WORDS, PLANES, PLANE_K, PLANES_PER_GROUP, OFFSET, ORDER, SPARSE, SPLITS, SCALE,
        HAS_GLOBAL_SCALE, HAS_ZERO, HAS_BIAS, EVEN_K, ASM, LOAD_SCALE, LOAD_ZERO, LOAD_TABLE, TABLE,
    )  # fmt: skip


@triton.jit
def matmul(
    x_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    sums_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    row,
    end,
    n_tile,
    weight_tile,
    tile_id,
    split,
    N,
    K,
    stride_x,
    stride_sums,
    k_tiles,
    tiles_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    PLANES_PER_GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """What one CTA of `linear` computes: BLOCK_M × BLOCK_N, from `row` to `end` along M, and N tile `n_tile`.

    `weight_tile` is the row of tiles that holds the weights of these columns, and `place` counts what
    blocks compute together (see `epilogue`).
    """
    offs_m = row + tl.arange(0, BLOCK_M)
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, PLANE_K)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, k_tiles)

    GROUPS: tl.constexpr = PLANES // PLANES_PER_GROUP if PLANES_PER_GROUP else 0
    block = weight_tile.to(tl.int64) * k_tiles + first
    grid = block * GROUPS if PLANES_PER_GROUP else weight_tile
    # several narrow planes are one dot product: on sm_90 each product waits for the one before
    PLANES_PER_DOT: tl.constexpr = (
        min(PLANES_PER_GROUP if PLANES_PER_GROUP else PLANES, _DOT_K // PLANE_K)
        if PLANE_K < 64
        else 1
    )
    k_offsets = tl.arange(0, PLANES_PER_DOT * PLANE_K)
    w_at = w_ptr + block * (WORDS * BLOCK_N * PLANE_K) + tile_n[:, None] * PLANE_K
    GROUPS_PER_TILE: tl.constexpr = GROUPS if PLANES_PER_GROUP else 1
    if SCALE is None:
        scale_at = scale_ptr + grid * BLOCK_N + tile_n
    else:
        scale_at = (
            scale_ptr + ((block if PLANES_PER_GROUP else grid) * BLOCK_N + tile_n) * GROUPS_PER_TILE
        )
    zero_at = zero_ptr + grid * BLOCK_N + tile_n
    sums_at = sums_ptr + first * GROUPS * stride_sums + row + tl.arange(0, BLOCK_M)
    x_at = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + first * (PLANES * PLANE_K)
    inside_m = offs_m[None, :] < end

    if LOAD_TABLE is not None:
        copy_at = table_ptr + TABLE + (tl.arange(0, 32) & 1) * 8
        tl.inline_asm_elementwise(
            LOAD_TABLE, "=r,l", [copy_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(first, last):
        planes = numbers(
            w_at, tile_k, x_ptr, table_ptr, BLOCK_N, WORDS, PLANES, OFFSET, ORDER, SPARSE, ASM
        )
        left = K - tile * (PLANES * PLANE_K)
        if SCALE is not None and PLANES_PER_GROUP:
            by = neighbours(scale_at, GROUPS_PER_TILE, SCALE, LOAD_SCALE)
        if PLANES_PER_GROUP == 0:
            for j in tl.static_range(0, PLANES, PLANES_PER_DOT):
                x = _activations(x_at, j, k_offsets, left, inside_m, PLANE_K, SPARSE, EVEN_K)
                acc = tl.dot(concat_planes(planes, j, PLANES_PER_DOT), x, acc)
        else:
            for group in tl.static_range(GROUPS):
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for j in tl.static_range(0, PLANES_PER_GROUP, PLANES_PER_DOT):
                    x = _activations(
                        x_at,
                        group * PLANES_PER_GROUP + j,
                        k_offsets,
                        left,
                        inside_m,
                        PLANE_K,
                        SPARSE,
                        EVEN_K,
                    )
                    part = tl.dot(
                        concat_planes(planes, group * PLANES_PER_GROUP + j, PLANES_PER_DOT), x, part
                    )
                if HAS_ZERO:
                    zero_point = _zeros(zero_at + group * BLOCK_N, OFFSET, LOAD_ZERO)
                    sums = tl.load(sums_at + group * stride_sums)
                    part += zero_point[:, None] * sums[None, :]
                if SCALE is None:
                    acc += part * load_scales(scale_at + group * BLOCK_N, LOAD_SCALE)[:, None]
                else:
                    acc += part * by[group][:, None]
        w_at += WORDS * BLOCK_N * PLANE_K
        x_at += PLANES * PLANE_K
        scale_at += GROUPS * BLOCK_N
        zero_at += GROUPS * BLOCK_N
        sums_at += GROUPS * stride_sums
    if PLANES_PER_GROUP == 0:
        if HAS_ZERO:
            # the sums are those of whole rows, which one split adds
            sums = tl.load(sums_at, mask=split == 0, other=0.0)
            acc += _zeros(zero_at, OFFSET, LOAD_ZERO)[:, None] * sums[None, :]
        if SCALE is None:
            acc *= load_scales(scale_at, LOAD_SCALE)[:, None]
        else:
            acc *= neighbours(scale_at, 1, SCALE, LOAD_SCALE)[0][:, None]
    if HAS_GLOBAL_SCALE:
        acc *= tl.load(global_scale_ptr)

    offs_n = n_tile * BLOCK_N + tile_n
    out_at = out_ptr + offs_m[None, :].to(tl.int64) * N + offs_n[:, None]
    stored = inside_m & (offs_n[:, None] < N)
    epilogue(
        acc, out_at, stored, bias_ptr, partial_ptr, semaphore_ptr, split, tile_id, tile_n, offs_n, N,
        BLOCK_M, BLOCK_N, SPLITS, HAS_BIAS,
    )  # fmt: skip


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


@triton.jit
def _zeros(at, OFFSET: tl.constexpr, LOAD: tl.constexpr):
    """OFFSET less the zero points of BLOCK_N rows in float32, loaded as scales are."""
    if at.dtype.element_ty != tl.uint8:
        offset = OFFSET - load_scales(at, LOAD)
    else:
        if LOAD is None:
            zero_point = tl.load(at).to(tl.int32)
        else:
            zero_point = tl.inline_asm_elementwise(
                LOAD, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
        # a small integer in the last bits of 2**23 is that much more: no conversion is needed
        offset = 8388608.0 + OFFSET - (zero_point | 0x4B000000).to(tl.float32, bitcast=True)
    return offset
