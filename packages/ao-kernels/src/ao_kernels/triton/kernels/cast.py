"""Casts to float8 in one pass: row-major, transposed, and their scales; see `ao_kernels.triton.cast`."""

import triton
import triton.language as tl


@triton.jit
def cast(
    x_ptr,
    found_ptr,
    found_t_ptr,
    codes_ptr,
    scale_ptr,
    codes_t_ptr,
    scale_t_ptr,
    M,
    N,
    words,
    blocks,
    blocks_t,
    TILES: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    MBITS: tl.constexpr,
    REACH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DIVIDE: tl.constexpr,
    SATURATE: tl.constexpr,
    REFINE: tl.constexpr,
    PACK: tl.constexpr,
):
    """TILES tiles of 128 × 128, one below the other, of x (M, N), contiguous.

    SCALES: "given", `found_ptr` is the scale; "tensor", the largest magnitude; "row", `found_ptr` (M,)
    and `found_t_ptr` (N,) are those of rows and columns; "block", they are found here, of 128 numbers.
    `codes_t_ptr`: int32, `words` a row, of four codes each.
    """
    four = tl.arange(0, 32)
    cols = tl.program_id(1) * 128 + tl.arange(0, 128)
    col_inside = cols < N
    # of what is the same for all tiles
    scale = _unit(cols)
    inverse = scale
    scale_t = scale
    inverse_t = scale
    if SCALES == "given" or SCALES == "tensor":
        scale = tl.load(found_ptr)
        if SCALES == "tensor":
            scale = _scale_of(scale, REACH, DIVIDE)
        inverse = _reciprocal(scale, REFINE)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr, scale)
            if TRANSPOSED:
                tl.store(scale_t_ptr, scale)
    elif SCALES == "row" and TRANSPOSED:
        found_t = tl.load(found_t_ptr + cols, mask=col_inside, other=0.0)
        scale_t = _scale_of(found_t, REACH, DIVIDE)
        inverse_t = _reciprocal(scale_t, REFINE)
        if tl.program_id(0) == 0:
            tl.store(scale_t_ptr + cols, scale_t, mask=col_inside)
    first = tl.program_id(0) * TILES
    for tile in range(first, tl.minimum(first + TILES, tl.cdiv(M, 128))):
        rows = tile * 128 + 4 * four
        x0, y0 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, REACH, DIVIDE, SATURATE, REFINE)  # fmt: skip
        x1, y1 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows + 1, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, REACH, DIVIDE, SATURATE, REFINE)  # fmt: skip
        x2, y2 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows + 2, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, REACH, DIVIDE, SATURATE, REFINE)  # fmt: skip
        x3, y3 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows + 3, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, REACH, DIVIDE, SATURATE, REFINE)  # fmt: skip
        if TRANSPOSED:
            if SCALES == "block":
                greatest = _greater(
                    _greater(tl.abs(x0), tl.abs(x1)), _greater(tl.abs(x2), tl.abs(x3))
                )
                scale_t = _scale_of(tl.reduce(greatest, 0, _greater), REACH, DIVIDE)
                inverse_t = _reciprocal(scale_t, REFINE)
                at = scale_t_ptr + cols.to(tl.int64) * blocks_t + tile
                tl.store(at, scale_t, mask=col_inside)
            if SCALES == "block" or SCALES == "row":
                by, factor = scale_t[None, :], inverse_t[None, :]
                y0 = _quotient(x0, by, factor, SATURATE)
                y1 = _quotient(x1, by, factor, SATURATE)
                y2 = _quotient(x2, by, factor, SATURATE)
                y3 = _quotient(x3, by, factor, SATURATE)
            word = tl.trans(_packed(y0, y1, y2, y3, FORMAT, MBITS, REACH, PACK))
            place = tile * 32 + four
            at = codes_t_ptr + cols.to(tl.int64)[:, None] * words + place[None, :]
            tl.store(at, word, mask=col_inside[:, None] & (place < words)[None, :])


@triton.jit
def _rows(
    x_ptr, found_ptr, codes_ptr, scale_ptr, rows, cols, scale, inverse, M, N, blocks,
    SCALES, FORMAT, MBITS, REACH, DIVIDE, SATURATE, REFINE,
):  # fmt: skip
    """Cast every fourth row of a tile; the numbers, and by their scales."""
    row_inside = rows < M
    inside = row_inside[:, None] & (cols < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    by = scale
    factor = inverse
    if SCALES == "block" or SCALES == "row":
        if SCALES == "block":
            found = tl.reduce(tl.abs(x), 1, _greater)
        else:
            found = tl.load(found_ptr + rows, mask=row_inside, other=0.0)
        of_rows = _scale_of(found, REACH, DIVIDE)
        column = tl.program_id(1)
        store = row_inside & ((column == 0) | (SCALES == "block"))
        tl.store(scale_ptr + rows.to(tl.int64) * blocks + column, of_rows, mask=store)
        by = of_rows[:, None]
        factor = _reciprocal(of_rows, REFINE)[:, None]
    y = _quotient(x, by, factor, SATURATE)
    codes = y.to(FORMAT) if SATURATE is not None else _code(y, FORMAT, MBITS, REACH)
    tl.store(codes_ptr + at, codes, mask=inside)
    return x, y


@triton.jit
def amax(
    x_ptr,
    found_ptr,
    found_t_ptr,
    M,
    N,
    TILES: tl.constexpr,
    SCALES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Largest magnitudes of x (M, N), contiguous: of all, or of rows and columns. They start from 0.

    Magnitudes are compared as the integers of their bits: the same order, with NaN above everything.
    """
    cols = tl.program_id(1) * 128 + tl.arange(0, 128)
    of_cols = tl.zeros((128,), tl.int32)
    first = tl.program_id(0) * TILES
    for tile in range(first, tl.minimum(first + TILES, tl.cdiv(M, 64))):
        rows = tile * 64 + tl.arange(0, 64)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if SCALES == "row":
            tl.atomic_max(found_ptr + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
        if TRANSPOSED or SCALES == "tensor":
            of_cols = tl.maximum(of_cols, tl.max(bits, 0))
    if SCALES == "tensor":
        tl.atomic_max(found_ptr, tl.max(of_cols, 0), sem="relaxed")
    elif TRANSPOSED:
        tl.atomic_max(found_t_ptr + cols, of_cols, mask=cols < N, sem="relaxed")


@triton.jit
def _unit(like):
    return like.to(tl.float32) * 0.0 + 1.0


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(greatest, REACH: tl.constexpr, DIVIDE: tl.constexpr):
    """As `choose_qparams`: greatest / REACH, of numbers that float32 has with all bits; of zeros 1."""
    if DIVIDE is None:
        scale = greatest / REACH
    else:
        scale = tl.inline_asm_elementwise(
            DIVIDE, "=&f,f,f,f", [greatest, REACH, 1.0 / REACH], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = tl.where(greatest == float("inf"), 3.4028234663852886e38, scale)
    return tl.where(greatest == 0.0, 1.0, scale)


@triton.jit
def _reciprocal(scale, REFINE: tl.constexpr):
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
def _quotient(x, scale, inverse, SATURATE: tl.constexpr):
    """The nearest number to x / scale."""
    if SATURATE is None:
        y = x / scale
    else:
        y = tl.inline_asm_elementwise(
            SATURATE, "=&f,f,f,f", [x, scale, inverse], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _packed(
    y0,
    y1,
    y2,
    y3,
    FORMAT: tl.constexpr,
    MBITS: tl.constexpr,
    REACH: tl.constexpr,
    PACK: tl.constexpr,
):
    """int32: the codes of four numbers, the first in the lowest byte."""
    if PACK is None:
        word = _byte(y0, FORMAT, MBITS, REACH) | _byte(y1, FORMAT, MBITS, REACH) << 8
        word |= _byte(y2, FORMAT, MBITS, REACH) << 16 | _byte(y3, FORMAT, MBITS, REACH) << 24
    else:
        word = tl.inline_asm_elementwise(
            PACK, "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _byte(y, FORMAT: tl.constexpr, MBITS: tl.constexpr, REACH: tl.constexpr):
    return _code(y, FORMAT, MBITS, REACH).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _code(y, FORMAT: tl.constexpr, MBITS: tl.constexpr, REACH: tl.constexpr):
    """The code of y as the device finds it: Triton 3.6's interpreter loses carries, and NaN."""
    code = _on_grid(y, MBITS, REACH).to(FORMAT).to(tl.uint8, bitcast=True)
    return tl.where(y == y, code, 127).to(tl.uint8).to(FORMAT, bitcast=True)


@triton.jit
def _on_grid(y, MBITS: tl.constexpr, REACH: tl.constexpr):
    """What the format holds, nearest to y."""
    bits = y.to(tl.int32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MBITS
    bits = bits + (1 << DROPPED - 1) - 1 + ((bits >> DROPPED) & 1)
    normal = (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)
    # below the smallest normal number, 2**-6 or 2**-14, steps are those that a larger one has beside it
    LEAST: tl.constexpr = 0.015625 if MBITS == 3 else 0.00006103515625
    LARGE: tl.constexpr = 1.5 * LEAST * (1 << DROPPED)
    magnitude = tl.abs(y)
    small = ((magnitude + LARGE) - LARGE).to(tl.int32, bitcast=True)
    signed = (small | (y.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    rounded = tl.where(magnitude < LEAST, signed, normal)
    rounded = tl.where(rounded > REACH, REACH, tl.where(rounded < -REACH, -REACH, rounded))
    return tl.where(y == y, rounded, 0.0)
