"""Scales, quotients and codes of float8, with the bits of the reference."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def greater(a, b):
    """The greater of two numbers; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(absmax, QMAX: tl.constexpr, DIVIDE: tl.constexpr):
    """As `choose_qparams`: absmax / QMAX, of numbers that float32 has with all bits; of zeros 1."""
    if DIVIDE is None:
        scale = absmax / QMAX
    else:
        scale = tl.inline_asm_elementwise(
            DIVIDE, "=&f,f,f,f", [absmax, QMAX, 1.0 / QMAX], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = tl.where(absmax == float("inf"), 3.4028234663852886e38, scale)
    return tl.where(absmax == 0.0, 1.0, scale)


@triton.jit
def reciprocal(scale, REFINE: tl.constexpr):
    """The nearest number to 1 / scale; the scale itself where `quotient` divides."""
    if REFINE is None:
        inverse = scale
    else:
        near = tl.inline_asm_elementwise(
            "rcp.approx.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.inline_asm_elementwise(
            REFINE, "=&f,f,f", [near, scale], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def quotient(x, scale, inverse, SATURATE: tl.constexpr):
    """The nearest number to x / scale."""
    if SATURATE is None:
        y = x / scale
    else:
        y = tl.inline_asm_elementwise(
            SATURATE, "=&f,f,f,f", [x, scale, inverse], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def code(y, FORMAT: tl.constexpr, MBITS: tl.constexpr, QMAX: tl.constexpr):
    """The code of y as the device finds it: Triton 3.6's interpreter loses carries, and NaN."""
    code = on_grid(y, MBITS, QMAX).to(FORMAT).to(tl.uint8, bitcast=True)
    return tl.where(y == y, code, 127).to(tl.uint8).to(FORMAT, bitcast=True)


@triton.jit
def on_grid(y, MBITS: tl.constexpr, QMAX: tl.constexpr):
    """What the format holds, nearest to y."""
    bits = y.to(tl.int32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MBITS
    bits = bits + (1 << DROPPED - 1) - 1 + ((bits >> DROPPED) & 1)
    normal = (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)
    # below the smallest normal number, 2**-6 or 2**-14, steps are those that a larger one has beside it
    MIN_NORMAL: tl.constexpr = 0.015625 if MBITS == 3 else 0.00006103515625
    LARGE: tl.constexpr = 1.5 * MIN_NORMAL * (1 << DROPPED)
    magnitude = tl.abs(y)
    small = ((magnitude + LARGE) - LARGE).to(tl.int32, bitcast=True)
    signed = (small | (y.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    rounded = tl.where(magnitude < MIN_NORMAL, signed, normal)
    rounded = tl.where(rounded > QMAX, QMAX, tl.where(rounded < -QMAX, -QMAX, rounded))
    return tl.where(y == y, rounded, 0.0)
