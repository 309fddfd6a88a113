"""Decoding weights on a trellis; see `ao_kernels.triton.trellis.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def decoded(
    words_at,
    place,
    table_ptr,
    inside,
    BITS: tl.constexpr,
    RING: tl.constexpr,
    MULTIPLIER: tl.constexpr,
):
    """Values in units of the table, int8, of the weights at some places of rings.

    A ring is one stream of bits, and the state at a place is the twelve bits of it that end with the place's
    own code. They are in one word of 32 bits, or in two.
    """
    WORDS: tl.constexpr = RING * BITS // 32
    first = place * BITS + (BITS - 12)
    first = tl.where(first < 0, first + RING * BITS, first)
    word = first // 32
    after = tl.where(word == WORDS - 1, 0, word + 1)
    low = tl.load(words_at + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(words_at + after, mask=inside, other=0).to(tl.uint32, bitcast=True)
    shift = (first % 32).to(tl.uint32)
    # two steps, as a shift by 32 is undefined
    state = ((low >> shift) | ((high << (31 - shift)) << 1)) & 4095
    return tl.load(table_ptr + (((state * MULTIPLIER) & 4095) >> 4).to(tl.int32))


@triton.jit
def dequantize(
    qdata_ptr,
    scale_ptr,
    table_ptr,
    out_ptr,
    N,
    K,
    BITS: tl.constexpr,
    RING: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Dense values (N, K), rounded once; a CTA has a ring of BLOCK_K columns each."""
    ring = tl.program_id(0)
    place = tl.arange(0, RING)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = ring * RING + place
    columns_at = qdata_ptr + (ring.to(tl.int64) * K + k) * (RING * BITS // 32)
    inside = (n < N)[:, None] & (k < K)[None, :]
    units = decoded(columns_at[None, :], place[:, None], table_ptr, inside, BITS, RING, MULTIPLIER)
    scale = tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    value = units.to(tl.float32) * (1.0 / UNIT) * scale[:, None]
    at = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["bias_ptr"])
def linear(
    x_ptr,
    qdata_ptr,
    scale_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    BITS: tl.constexpr,
    RING: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiply x (M, K) by the transpose of a weight (N, K), of which a CTA has BLOCK_N rows of one ring.

    The integers of the table are exact in bfloat16 and float16. Sums are in float32, and what is the same for
    a row, scale and unit, multiplies them afterwards.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ring = tl.program_id(0) * BLOCK_N // RING
    ring_at = qdata_ptr + ring.to(tl.int64) * K * (RING * BITS // 32)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K)[:, None] & (n < N)[None, :]
        columns_at = ring_at + k * (RING * BITS // 32)
        units = decoded(
            columns_at[:, None], (n % RING)[None, :], table_ptr, inside, BITS, RING, MULTIPLIER
        )
        x = tl.load(x_at + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(x, units.to(x.dtype), sums)
    sums *= (tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32) * (1.0 / UNIT))[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
