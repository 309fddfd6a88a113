"""Products of activations with block-sparse weights; see `ao_kernels.triton.bsr` for the layout."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def linear(
    x_ptr,
    blocks_ptr,
    cols_ptr,
    starts_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    M,
    N,
    K,
    stride_x,
    SIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The product x (M, K) @ weight.T + bias: one block for ROWS × SIDE of it, or a part of its sum.

    `order_ptr` has the weight's rows of blocks, the longest first. AT_ONCE blocks of SIDE × SIDE, side by
    side, are the left operand of a turn, and activations that belong to them the right one.
    """
    place = tl.load(order_ptr + tl.program_id(0))
    split = tl.program_id(1)
    row_tile = tl.program_id(2)
    first = tl.load(starts_ptr + place)
    last = tl.load(starts_ptr + place + 1)
    if SPLITS > 1:
        share = tl.cdiv(last - first, SPLITS)
        first += split * share
        last = tl.minimum(first + share, last)

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, AT_ONCE * SIDE)
    side = tl.arange(0, SIDE)
    present = (rows < M)[None, :]
    row_at = x_ptr + rows[None, :].to(tl.int64) * stride_x
    within = inner // SIDE * (SIDE * SIDE) + inner % SIDE
    blocks_at = (
        blocks_ptr + first.to(tl.int64) * (SIDE * SIDE) + side[:, None] * SIDE + within[None, :]
    )
    acc = tl.zeros((SIDE, ROWS), tl.float32)
    for block in range(first, last, AT_ONCE):
        if AT_ONCE == 1:
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
        blocks_at += AT_ONCE * SIDE * SIDE

    col = place * SIDE + side
    out_at = out_ptr + rows[None, :].to(tl.int64) * N + col[:, None]
    inside = present & (col < N)[:, None]
    if SPLITS == 1:
        _store(out_at, inside, acc, bias_ptr, col, N, HAS_BIAS)
    else:
        tile = row_tile * tl.num_programs(0) + place
        within = side[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        parts_at = partial_ptr + tile.to(tl.int64) * (SPLITS * SIDE * ROWS) + within
        tl.store(parts_at + split * (SIDE * ROWS), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(lock_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            # all parts are there, and are always summed in the same order
            total = tl.zeros((SIDE, ROWS), tl.float32)
            for i in range(SPLITS):
                total += tl.load(parts_at + i * (SIDE * ROWS), cache_modifier=".cg")
            _store(out_at, inside, total, bias_ptr, col, N, HAS_BIAS)
            tl.store(lock_ptr + tile, 0)


@triton.jit
def _store(at, inside, acc, bias_ptr, col, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[:, None]
    tl.store(at, acc.to(at.dtype.element_ty), mask=inside)
