"""Rows that are computed and quantized in one pass; see `ao_kernels.triton.rows.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_prefetch import start
from ao_kernels.triton.shared.kernel_rounding import code, greater, quotient, reciprocal, scale_of


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["zero_ptr"])
def quantize_rows(
    x_ptr,
    other_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    M,
    K,
    stride_x,
    stride_other,
    eps,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SOURCE: tl.constexpr,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    MBITS: tl.constexpr,
    QMAX: tl.constexpr,
    DIVIDE: tl.constexpr,
    SATURATE: tl.constexpr,
    REFINE: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of K ≤ COLS numbers, each with a scale of its own.

    SOURCE: "plain", they are those of x (M, K); "rms_norm", x over its root mean square, times `other_ptr`
    (K,) where stride_other is 1; "silu_mul", silu(x) times `other_ptr` (M, K). They are rounded to the type
    of x. KIND of the codes: "float", "signed" or "unsigned", which has zero points.
    With PDL the matmul behind may start while this runs, and prefetch weights of 4 bits.
    """
    start(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    row_inside = rows < M
    inside = row_inside[:, None] & (cols < K)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_x + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SOURCE == "rms_norm":
        root = tl.rsqrt(tl.sum(x * x, 1) / K + eps)
        # in the places of x: weights of their own would come through shared memory
        by = (cols * stride_other)[None, :] + (rows * 0)[:, None]
        weight = tl.load(other_ptr + by, mask=(cols < K)[None, :], other=0.0).to(tl.float32)
        x = _rounded(x * root[:, None] * weight, x_ptr, ROUND)
    elif SOURCE == "silu_mul":
        by = rows.to(tl.int64)[:, None] * stride_other + cols[None, :]
        up = tl.load(other_ptr + by, mask=inside, other=0.0).to(tl.float32)
        x = _rounded(x / (1.0 + tl.exp(-x)) * up, x_ptr, ROUND)
    if KIND == "unsigned":
        low = tl.minimum(tl.reduce(x, 1, _less), 0.0, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(tl.reduce(x, 1, greater), 0.0, propagate_nan=tl.PropagateNan.ALL)
        scale = scale_of(high * 0.5 - low * 0.5, QMAX, DIVIDE)
    else:
        scale = scale_of(tl.reduce(tl.abs(x), 1, greater), QMAX, DIVIDE)
    inverse = reciprocal(scale, REFINE)
    y = quotient(x, scale[:, None], inverse[:, None], SATURATE)
    if KIND == "float":
        codes = y.to(FORMAT) if SATURATE is not None else code(y, FORMAT, MBITS, QMAX)
    elif KIND == "signed":
        codes = _integer(y, -128.0, 127.0, scale[:, None]).to(tl.int8)
    else:
        zero_point = _integer(-quotient(low, scale, inverse, SATURATE), 0.0, 255.0, scale)
        tl.store(zero_ptr + rows, zero_point.to(tl.uint8), mask=row_inside)
        codes = _integer(y + zero_point.to(tl.float32)[:, None], 0.0, 255.0, scale[:, None]).to(
            tl.uint8
        )
    tl.store(codes_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], codes, mask=inside)
    tl.store(scale_ptr + rows, scale, mask=row_inside)


@triton.jit
def _less(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded(x, like_ptr, ROUND: tl.constexpr):
    """In float32, rounded to the type of what a pointer is to; ROUND does so for two at once."""
    element = like_ptr.dtype.element_ty
    if ROUND is not None:
        x = tl.inline_asm_elementwise(ROUND, "=r,f,f", [x], dtype=element, is_pure=True, pack=2)
    return x.to(element).to(tl.float32)


@triton.jit
def _integer(y, LOW: tl.constexpr, HIGH: tl.constexpr, scale):
    """The nearest integer in a range, ties to even, as int32; with a scale that is not a number 0."""
    low = tl.where(scale == scale, LOW, 0.0)
    high = tl.where(scale == scale, HIGH, 0.0)
    y = tl.minimum(tl.maximum(y, low), high)
    # the integer stands in the last bits of 1.5 · 2**23 plus it
    return (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
