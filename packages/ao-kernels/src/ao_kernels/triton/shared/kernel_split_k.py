"""The epilogue of matmuls: bias, output dtype, and the reduction of split-K."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def epilogue(
    acc,
    out_at,
    inside,
    bias_ptr,
    partial_ptr,
    semaphore_ptr,
    split,
    splits,
    tile_id,
    tile_n,
    offs_n,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store the sums of a tile, BLOCK_N × BLOCK_M, plus bias: with SPLIT, the last of `splits` CTAs does.

    `tile_id` is the number of the output tile, for its semaphore and its partial sums. `tile_n` counts N
    within the tile, and `offs_n` is N in the result. Only what is inside is written, and read again.
    """
    if not SPLIT:
        _store(out_at, inside, acc, bias_ptr, offs_n, N, HAS_BIAS)
    else:
        within = tile_n[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts_at = partial_ptr + tile_id.to(tl.int64) * splits * (BLOCK_N * BLOCK_M) + within
        tl.store(parts_at + split * (BLOCK_N * BLOCK_M), acc, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(semaphore_ptr + tile_id, 1, sem="acq_rel")
        if arrived == splits - 1:
            # all partial sums are there, and are always added in the same order
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in range(splits):
                at = parts_at + i * (BLOCK_N * BLOCK_M)
                total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            _store(out_at, inside, total, bias_ptr, offs_n, N, HAS_BIAS)
            tl.store(semaphore_ptr + tile_id, 0)


@triton.jit
def _store(at, inside, acc, bias_ptr, offs_n, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(at, acc.to(at.dtype.element_ty), mask=inside)
