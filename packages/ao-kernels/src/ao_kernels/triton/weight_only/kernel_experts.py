"""Grouped weight-only matmuls: the weights of experts; see `ao_kernels.triton.weight_only.layout`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_offsets import find
from ao_kernels.triton.shared.kernel_prefetch import start
from ao_kernels.triton.weight_only.kernel import matmul


@triton.jit(
    do_not_specialize=["M", "experts", "n_tiles", "k_tiles", "tiles_per_split", "splits"],
    do_not_specialize_on_alignment=["offs_ptr", "semaphore_ptr"],
)
def linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    zero_ptr,
    table_ptr,
    offs_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    M,
    N,
    K,
    experts,
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
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`kernel.linear` for the rows of each expert, sorted: those up to offs[e] meet the e-th weight.

    The tiles of one expert's weights follow those of another's. GROUPS is a power of two above the number of
    experts. Rows that no expert has become 0. With PDL (programmatic dependent launch), the dependent kernel
    may start at once. So may this, but without an L2 prefetch: it has to wait for the offsets, which say
    what weights it needs.
    """
    m_tile = tl.program_id(0)
    n_block = tl.program_id(1)
    split = tl.program_id(2)
    start(PDL)
    row, end, expert = find(offs_ptr, m_tile, M, experts, BLOCK_M, GROUPS)
    if expert < experts:
        matmul(
            x_ptr, w_ptr, scale_ptr, global_scale_ptr + expert, zero_ptr, table_ptr, x_ptr, out_ptr,
            partial_ptr, semaphore_ptr,
            row, end, n_block, expert, m_tile * tl.num_programs(1) + n_block, split,
            N, K, stride_x, n_tiles, k_tiles, tiles_per_split, splits,
            BLOCK_M, BLOCK_N, WORDS, PLANES, PLANE_K, PLANES_PER_GROUP, OFFSET, ORDER, SPARSE, SPLIT, SCALE,
            HAS_GLOBAL_SCALE, HAS_ZERO, HAS_BIAS, EVEN_K, ASM, ONES, LOAD_SCALE, LOAD_ZERO, LOAD_TABLE, TABLE,
        )  # fmt: skip
    elif split == 0:
        offs_m = row + tl.arange(0, BLOCK_M)[:, None]
        tile_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        none = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + offs_m.to(tl.int64) * N + tile_n, none, mask=(offs_m < end) & (tile_n < N)
        )
