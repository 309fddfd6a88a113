"""Casts to float8 in one pass: row-major, transposed, and their scales; see `ao_kernels.triton.cast.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_rounding import code, greater, quotient, reciprocal, scale_of


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
    QMAX: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DIVIDE: tl.constexpr,
    SATURATE: tl.constexpr,
    REFINE: tl.constexpr,
    PACK: tl.constexpr,
):
    """TILES tiles of 128 × 128, one below the other, of x (M, N), contiguous.

    SCALES: "given", `found_ptr` is the scale; "tensor", the largest magnitude; "row", `found_ptr` (M,)
    and `found_t_ptr` (N,) are those of rows and columns; "block", they are found here, of 128 numbers.
    `codes_t_ptr`: int32, `words` per row, of four codes each.
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
            scale = scale_of(scale, QMAX, DIVIDE)
        inverse = reciprocal(scale, REFINE)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr, scale)
            if TRANSPOSED:
                tl.store(scale_t_ptr, scale)
    elif SCALES == "row" and TRANSPOSED:
        found_t = tl.load(found_t_ptr + cols, mask=col_inside, other=0.0)
        scale_t = scale_of(found_t, QMAX, DIVIDE)
        inverse_t = reciprocal(scale_t, REFINE)
        if tl.program_id(0) == 0:
            tl.store(scale_t_ptr + cols, scale_t, mask=col_inside)
    first = tl.program_id(0) * TILES
    for tile in range(first, tl.minimum(first + TILES, tl.cdiv(M, 128))):
        rows = tile * 128 + 4 * four
        x0, y0 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, QMAX, DIVIDE, SATURATE, REFINE)  # fmt: skip
        x1, y1 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows + 1, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, QMAX, DIVIDE, SATURATE, REFINE)  # fmt: skip
        x2, y2 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows + 2, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, QMAX, DIVIDE, SATURATE, REFINE)  # fmt: skip
        x3, y3 = _rows(x_ptr, found_ptr, codes_ptr, scale_ptr, rows + 3, cols, scale, inverse, M, N, blocks,
                       SCALES, FORMAT, MBITS, QMAX, DIVIDE, SATURATE, REFINE)  # fmt: skip
        if TRANSPOSED:
            if SCALES == "block":
                absmax = greater(greater(tl.abs(x0), tl.abs(x1)), greater(tl.abs(x2), tl.abs(x3)))
                scale_t = scale_of(tl.reduce(absmax, 0, greater), QMAX, DIVIDE)
                inverse_t = reciprocal(scale_t, REFINE)
                at = scale_t_ptr + cols.to(tl.int64) * blocks_t + tile
                tl.store(at, scale_t, mask=col_inside)
            if SCALES == "block" or SCALES == "row":
                by, factor = scale_t[None, :], inverse_t[None, :]
                y0 = quotient(x0, by, factor, SATURATE)
                y1 = quotient(x1, by, factor, SATURATE)
                y2 = quotient(x2, by, factor, SATURATE)
                y3 = quotient(x3, by, factor, SATURATE)
            word = tl.trans(_packed(y0, y1, y2, y3, FORMAT, MBITS, QMAX, PACK))
            place = tile * 32 + four
            at = codes_t_ptr + cols.to(tl.int64)[:, None] * words + place[None, :]
            tl.store(at, word, mask=col_inside[:, None] & (place < words)[None, :])


@triton.jit
def _rows(
    x_ptr, found_ptr, codes_ptr, scale_ptr, rows, cols, scale, inverse, M, N, blocks,
    SCALES, FORMAT, MBITS, QMAX, DIVIDE, SATURATE, REFINE,
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
            found = tl.reduce(tl.abs(x), 1, greater)
        else:
            found = tl.load(found_ptr + rows, mask=row_inside, other=0.0)
        of_rows = scale_of(found, QMAX, DIVIDE)
        column = tl.program_id(1)
        store = row_inside & ((column == 0) | (SCALES == "block"))
        tl.store(scale_ptr + rows.to(tl.int64) * blocks + column, of_rows, mask=store)
        by = of_rows[:, None]
        factor = reciprocal(of_rows, REFINE)[:, None]
    y = quotient(x, by, factor, SATURATE)
    codes = y.to(FORMAT) if SATURATE is not None else code(y, FORMAT, MBITS, QMAX)
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
def _packed(
    y0,
    y1,
    y2,
    y3,
    FORMAT: tl.constexpr,
    MBITS: tl.constexpr,
    QMAX: tl.constexpr,
    PACK: tl.constexpr,
):
    """int32: the codes of four numbers, the first in the lowest byte."""
    if PACK is None:
        word = _byte(y0, FORMAT, MBITS, QMAX) | _byte(y1, FORMAT, MBITS, QMAX) << 8
        word |= _byte(y2, FORMAT, MBITS, QMAX) << 16 | _byte(y3, FORMAT, MBITS, QMAX) << 24
    else:
        word = tl.inline_asm_elementwise(
            PACK, "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _byte(y, FORMAT: tl.constexpr, MBITS: tl.constexpr, QMAX: tl.constexpr):
    return code(y, FORMAT, MBITS, QMAX).to(tl.uint8, bitcast=True).to(tl.int32)
