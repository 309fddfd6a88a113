"""Products of two operands in 8 bits, scaled in float32; see `ao_kernels.triton.scaled_mm.launch`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_offsets import find


@triton.jit(do_not_specialize=["M", "row_tiles"])
def product(
    a,
    b,
    a_scale_ptr,
    b_scale_ptr,
    zero_ptr,
    sums_ptr,
    bias_ptr,
    offs_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    row_tiles,
    experts,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
    SUM: tl.constexpr,
    A_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    PROMOTE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The product a (M, K) @ b (N, K).T of codes: one block for ROWS × COLS of it.

    `a` and `b` are descriptors of tiles of STEP columns, or pointers where TMA is false. A_SCALES and
    B_SCALES: "one", "row", "block" of STEP columns, for b stored as (K / STEP, N) with N up to a multiple of
    STEP, and for b "square" of STEP rows too. Sums have the type SUM; with PROMOTE those of STEP columns are
    added up outside of the tensor cores. With zero points of the rows of `a`, each times the sum of a row of
    b is taken off.

    With GROUPS, a power of two above the number of experts, b is (experts · N, K), and the rows of `a` up to
    offs[e] are those of expert e; what has no expert becomes 0.
    """
    # blocks go down BAND tiles before they go right: those that run together share both operands
    pid = tl.program_id(0)
    col_tiles = tl.cdiv(N, COLS)
    top = pid // (BAND * col_tiles) * BAND
    height = tl.minimum(row_tiles - top, BAND)
    row_tile = top + pid % (BAND * col_tiles) % height
    col = pid % (BAND * col_tiles) // height * COLS
    row = row_tile * ROWS
    end = M
    b_row = 0
    b_square = col // STEP
    all_steps = tl.cdiv(K, STEP)
    steps = all_steps
    if GROUPS:
        row, end, expert = find(offs_ptr, row_tile, M, experts, ROWS, GROUPS)
        known = expert < experts
        steps = tl.where(known, steps, 0)
        b_row = tl.where(known, expert * N, 0)
        b_square += tl.where(known, expert * tl.cdiv(N, STEP), 0)
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    row_inside = rows < end
    col_inside = cols < N

    a_scale_at = a_scale_ptr
    b_scale_at = b_scale_ptr
    if A_SCALES == "block":
        a_scale_at += rows.to(tl.int64) * all_steps
        b_scale_at += b_square * all_steps if B_SCALES == "square" else cols
    acc = tl.zeros((ROWS, COLS), SUM)
    for step in range(steps):
        x = _tile(a, row, rows, row_inside, step, K, stride_a, STEP, TMA)
        w = _tile(b, b_row + col, b_row + cols, col_inside, step, K, stride_b, STEP, TMA)
        if A_SCALES == "block":
            by_row = tl.load(a_scale_at + step, mask=row_inside, other=0.0)
            if B_SCALES == "square":
                by_row *= tl.load(b_scale_at + step)
                acc += tl.dot(x, w.T) * by_row[:, None]
            else:
                by_col = tl.load(b_scale_at + step * (tl.cdiv(N, STEP) * STEP))
                acc += tl.dot(x, w.T) * by_row[:, None] * by_col[None, :]
        elif PROMOTE:
            acc += tl.dot(x, w.T)
        else:
            acc = tl.dot(x, w.T, acc, out_dtype=SUM)

    if HAS_ZERO:
        zero_point = tl.load(zero_ptr + rows, mask=row_inside, other=0)
        acc -= (
            zero_point[:, None]
            * tl.load(sums_ptr + b_row + cols, mask=col_inside, other=0)[None, :]
        )
    out = acc.to(tl.float32)
    if A_SCALES == "one":
        out *= tl.load(a_scale_ptr)
    elif A_SCALES == "row":
        out *= tl.load(a_scale_ptr + rows, mask=row_inside, other=0.0)[:, None]
    if B_SCALES == "one":
        out *= tl.load(b_scale_ptr)
    elif B_SCALES == "row":
        out *= tl.load(b_scale_ptr + b_row + cols, mask=col_inside, other=0.0)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + cols, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    if GROUPS:
        out = tl.where(known, out, 0.0)
    at = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = row_inside[:, None] & col_inside[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile(of, first, rows, inside, step, K, stride, STEP: tl.constexpr, TMA: tl.constexpr):
    """Columns from `step` · STEP on of the rows, the first of which is `first`; outside is 0."""
    if TMA:
        tile = of.load([first, step * STEP])
    else:
        inner = step * STEP + tl.arange(0, STEP)
        at = of + rows.to(tl.int64)[:, None] * stride + inner[None, :]
        tile = tl.load(at, mask=inside[:, None] & (inner < K)[None, :], other=0.0)
    return tile
