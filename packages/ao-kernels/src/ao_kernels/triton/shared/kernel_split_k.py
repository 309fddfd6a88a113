"""How a product is stored, also where several blocks have a part of each sum."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def finish(
    acc,
    out_at,
    inside,
    bias_ptr,
    partial_ptr,
    lock_ptr,
    split,
    place,
    cols,
    col,
    N,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store the sums of a tile, COLS × ROWS, plus bias: at once, or by the last of SPLITS blocks to arrive.

    `place` is that of the tile among all, for its counter and its parts; `cols` counts its columns of the
    result, and `col` says which those are.
    """
    if SPLITS == 1:
        _store(out_at, inside, acc, bias_ptr, col, N, HAS_BIAS)
    else:
        within = cols[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        parts_at = partial_ptr + place.to(tl.int64) * (SPLITS * COLS * ROWS) + within
        tl.store(parts_at + split * (COLS * ROWS), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(lock_ptr + place, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            # all parts are there, and are always summed in the same order
            total = tl.zeros((COLS, ROWS), tl.float32)
            for i in range(SPLITS):
                total += tl.load(parts_at + i * (COLS * ROWS), cache_modifier=".cg")
            _store(out_at, inside, total, bias_ptr, col, N, HAS_BIAS)
            tl.store(lock_ptr + place, 0)


@triton.jit
def _store(at, inside, acc, bias_ptr, col, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[:, None]
    tl.store(at, acc.to(at.dtype.element_ty), mask=inside)
