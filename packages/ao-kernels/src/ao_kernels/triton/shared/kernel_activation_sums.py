"""Sums of activations, for products with zero points."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def group_sums(
    x_ptr,
    out_ptr,
    M,
    K,
    stride_x,
    stride_out,
    group,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sums of each `group` neighbouring columns of x (M, K), to float32 (groups, stride_out), 0 from M on."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * group
    last = tl.minimum(first + group, K)
    inner = tl.arange(0, STEP)
    total = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(first, last, STEP):
        cols = start + inner
        at = x_ptr + rows[:, None].to(tl.int64) * stride_x + cols[None, :]
        inside = (rows[:, None] < M) & (cols[None, :] < last)
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + tl.program_id(1) * stride_out + rows
    tl.store(out_at, tl.sum(total, 1), mask=rows < stride_out)
