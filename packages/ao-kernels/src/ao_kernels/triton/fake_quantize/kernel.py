"""Quantization in small blocks and back in one pass; see `ao_kernels.triton.fake_quantize.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_rounding import greater, quotient, reciprocal, scale_of


@triton.jit
def round_rows(
    x_ptr,
    found_ptr,
    out_ptr,
    blocks,
    K,
    a_row,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    SCALES: tl.constexpr,
    MBITS: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    QMAX: tl.constexpr,
    BELOW: tl.constexpr,
    CARRY: tl.constexpr,
    DIVIDE: tl.constexpr,
    SATURATE: tl.constexpr,
    REFINE: tl.constexpr,
):
    """HELD of the blocks of BLOCK neighbouring numbers in the rows of x (M, K), contiguous.

    `a_row`: blocks of a row, the last one shorter where EVEN is not set. SCALES: "e8m0", powers of two, BELOW
    less than the exponent of the greatest magnitude, or one more where its mantissa is at least CARRY;
    "e4m3"; or "nested", those times one more, by the absmax of all numbers at `found_ptr`. The
    format has MBITS of mantissa, the smallest normal number MIN_NORMAL and the largest number QMAX; integers
    have 0, 0 and the largest.
    """
    block = tl.program_id(0) * HELD + tl.arange(0, HELD)
    inner = tl.arange(0, BLOCK)
    inside = (block < blocks)[:, None]
    if EVEN:
        at = block.to(tl.int64)[:, None] * BLOCK + inner[None, :]
    else:
        row = block // a_row
        col = ((block - row * a_row) * BLOCK)[:, None] + inner[None, :]
        at = (row.to(tl.int64) * K)[:, None] + col
        inside = inside & (col < K)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.reduce(tl.abs(x), 1, greater)
    if SCALES == "e8m0":
        scale, inverse = _power_of_two(absmax, BELOW, CARRY)
        y = x * inverse[:, None]
    else:
        scale = scale_of(absmax, QMAX, DIVIDE)
        if SCALES == "nested":
            of_all = scale_of(scale_of(tl.load(found_ptr), QMAX, DIVIDE), 448.0, DIVIDE)
            part = quotient(scale, of_all, reciprocal(of_all, REFINE), SATURATE)
            scale = _nearest(part, 3, 0.015625, 448.0) * of_all
        else:
            scale = _nearest(tl.where(scale < 0.001953125, 0.001953125, scale), 3, 0.015625, 448.0)
        scale = tl.where(absmax == absmax, scale, float("nan"))
        by = tl.where(scale == 0.0, float("inf"), scale)
        y = quotient(x, by[:, None], reciprocal(by, REFINE)[:, None], SATURATE)
    out = _nearest(y, MBITS, MIN_NORMAL, QMAX) * scale[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _power_of_two(absmax, BELOW: tl.constexpr, CARRY: tl.constexpr):
    """The scale 2**e of blocks and its reciprocal, exact; 1 for zeros, NaN for what is not finite."""
    bits = absmax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - BELOW + ((bits & 0x7FFFFF) >= CARRY).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), 254)
    code = tl.where(absmax == 0.0, 127, code)
    # 2**-127 is subnormal: half of the least that the exponent alone can say
    scale = tl.where(code == 0, 0x400000, code << 23)
    inverse = tl.where(code == 254, 0x400000, 254 - code << 23)
    finite = bits < 0x7F800000
    return (
        tl.where(finite, scale, 0x7FC00000).to(tl.float32, bitcast=True),
        inverse.to(tl.float32, bitcast=True),
    )


@triton.jit
def _nearest(y, MBITS: tl.constexpr, MIN_NORMAL: tl.constexpr, QMAX: tl.constexpr):
    """What the format holds, nearest to y, ties to even; saturating; of NaN it is any number."""
    if MIN_NORMAL == 0:
        # the steps of float32 at 1.5 * 2**23 are integers
        near = (y + 12582912.0) - 12582912.0
        near = tl.minimum(tl.maximum(near, -QMAX - 1.0), QMAX)
    else:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(tl.abs(y), QMAX)
        power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        # at so many times the power of two, the steps of float32 are those of the format
        large = tl.maximum(power, MIN_NORMAL) * (1 << 23 - MBITS)
        near = ((magnitude + large) - large).to(tl.int32, bitcast=True)
        near = (near | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return near
