"""Matmuls of activations with block-sparse weights; see `ao_kernels.triton.bsr.launch` for the layout."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_split_k import epilogue


@triton.jit(
    do_not_specialize=["M", "splits"], do_not_specialize_on_alignment=["bias_ptr", "semaphore_ptr"]
)
def linear(
    x_ptr,
    blocks_ptr,
    cols_ptr,
    starts_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    M,
    N,
    K,
    stride_x,
    splits,
    SIDE: tl.constexpr,
    BLOCKS_PER_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The matmul x (M, K) @ weight.T + bias: one CTA for BLOCK_M × SIDE of it, or a split of K.

    `order_ptr` has the weight's rows of blocks, the longest first. BLOCKS_PER_DOT blocks of SIDE × SIDE,
    side by side, are the left operand of a turn, and activations that belong to them the right one.
    """
    tile_id = tl.load(order_ptr + tl.program_id(0))
    split = tl.program_id(1)
    m_tile = tl.program_id(2)
    first = tl.load(starts_ptr + tile_id)
    last = tl.load(starts_ptr + tile_id + 1)
    if SPLIT:
        share = tl.cdiv(last - first, splits)
        first += split * share
        last = tl.minimum(first + share, last)

    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCKS_PER_DOT * SIDE)
    side = tl.arange(0, SIDE)
    present = (offs_m < M)[None, :]
    row_at = x_ptr + offs_m[None, :].to(tl.int64) * stride_x
    within = inner // SIDE * (SIDE * SIDE) + inner % SIDE
    blocks_at = (
        blocks_ptr + first.to(tl.int64) * (SIDE * SIDE) + side[:, None] * SIDE + within[None, :]
    )
    acc = tl.zeros((SIDE, BLOCK_M), tl.float32)
    for block in range(first, last, BLOCKS_PER_DOT):
        if BLOCKS_PER_DOT == 1:
            col = tl.load(cols_ptr + block) * SIDE + inner
            weights = tl.load(blocks_at)
            inside = present
        else:
            there = block + inner // SIDE < last
            col = (
                tl.load(cols_ptr + block + inner // SIDE, mask=there, other=0) * SIDE + inner % SIDE
            )
            col = tl.max_contiguous(tl.multiple_of(col, SIDE), SIDE)
            weights = tl.load(blocks_at, mask=there[None, :], other=0.0)
            inside = present & there[:, None]
        if not EVEN_K:
            inside = inside & (col < K)[:, None]
        x = tl.load(row_at + col[:, None], mask=inside, other=0.0)
        acc = tl.dot(weights, x, acc, input_precision=PRECISION)
        blocks_at += BLOCKS_PER_DOT * SIDE * SIDE

    col = tile_id * SIDE + side
    out_at = out_ptr + offs_m[None, :].to(tl.int64) * N + col[:, None]
    inside = present & (col < N)[:, None]
    at = m_tile * tl.num_programs(0) + tile_id
    epilogue(
        acc, out_at, inside, bias_ptr, partial_ptr, semaphore_ptr, split, splits, at, side, col, N,
        BLOCK_M, SIDE, SPLIT, HAS_BIAS,
    )  # fmt: skip
