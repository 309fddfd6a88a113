"""Products of activations in 8 bits with weights in 4; see `ao_kernels.triton.plane32` for the layout."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ao_kernels.triton.kernels.plane16 import _scales, _zeros
from ao_kernels.triton.kernels.planes import beside
from ao_kernels.triton.kernels.splits import finish


@triton.jit(do_not_specialize=["M", "tiles", "tiles_a_split"])
def linear(
    x_ptr,
    x_scale_ptr,
    x_zero_ptr,
    x_sums_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    row_sums_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    M,
    N,
    K,
    stride_x,
    tiles,
    tiles_a_split,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_X_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    TO_FLOAT: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The product x (M, K) @ weight.T + bias: one block for ROWS × COLS of it and a part of K.

    `x_ptr` has codes, int8 or float8, with scales of rows; with HAS_X_ZERO those are uint8 codes less 128,
    and rows have zero points. CHAIN planes share a scale of the weight, or all of a row does where CHAIN is
    0. The weights are the left operand, which the tensor cores take from registers: as (value - OFFSET) /
    FACTOR. Where OFFSET is not 0, or with zero points z, (OFFSET - z) times the sum of a group's
    activations, from `x_sums_ptr` (groups, M), is added before scales are applied, in float32.

    ASM, TO_FLOAT and what begins with LOAD are texts of `ao_kernels.triton.assembly`; where one is None,
    plain operations do the same. With AHEAD, PREFETCH brings so many tiles nearer while the kernel before
    still runs.
    """
    col_tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tile = tl.program_id(2)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inner = tl.arange(0, PLANE)
    first = split * tiles_a_split
    last = tl.minimum(first + tiles_a_split, tiles)

    INTEGERS: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    HAS_SUMS: tl.constexpr = HAS_ZERO or OFFSET != 0
    AT_ONCE: tl.constexpr = CHAIN if CHAIN else PLANES
    GROUPS: tl.constexpr = PLANES // CHAIN if CHAIN else 0
    block = col_tile.to(tl.int64) * tiles + first
    grid = block * GROUPS if CHAIN else col_tile
    several = tl.arange(0, AT_ONCE * PLANE)
    row_at = w_ptr + block * (COLS * PLANE) + cols[:, None] * PLANE
    scale_at = scale_ptr + grid * COLS + cols
    zero_at = zero_ptr + grid * COLS + cols
    sums_at = x_sums_ptr + first.to(tl.int64) * GROUPS * M + rows
    x_at = x_ptr + rows[None, :].to(tl.int64) * stride_x + first * (PLANES * PLANE)
    present = rows[None, :] < M

    if AHEAD:
        gdc_launch_dependents()
        lines = tl.arange(0, COLS * PLANE // 32) * 32
        for soon in tl.static_range(AHEAD):
            near = tl.minimum(block + soon, tl.num_programs(0).to(tl.int64) * tiles - 1)
            line_at = w_ptr + near * (COLS * PLANE) + lines
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l", [line_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
            )
        gdc_wait()  # only now there are activations
    acc = tl.zeros((COLS, ROWS), tl.int32 if INTEGERS and CHAIN == 0 else tl.float32)
    for tile in range(first, last):
        planes = _numbers(row_at, inner, x_ptr, PLANES, ASM)
        left = K - tile * (PLANES * PLANE)
        for group in tl.static_range(PLANES // AT_ONCE):
            col = (group * AT_ONCE * PLANE + several)[:, None]
            x = tl.load(x_at + col, mask=present if EVEN_K else present & (col < left), other=0.0)
            w = beside(planes, group * AT_ONCE, AT_ONCE)
            if CHAIN == 0 and INTEGERS:
                acc = tl.dot(w, x, acc, out_dtype=tl.int32)
            elif CHAIN == 0:
                acc += tl.dot(w, x)
            else:
                part = _to_float(tl.dot(w, x, out_dtype=tl.int32), TO_FLOAT) if INTEGERS else tl.dot(w, x)
                if HAS_SUMS:
                    sums = tl.load(sums_at + group * M, mask=rows < M, other=0.0)
                    part += _offset(
                        zero_at + group * COLS, sums, OFFSET, FACTOR, HAS_ZERO, LOAD_ZERO
                    )
                acc += part * _scales(scale_at + group * COLS, LOAD_SCALE)[:, None]
        row_at += COLS * PLANE
        x_at += PLANES * PLANE
        scale_at += GROUPS * COLS
        zero_at += GROUPS * COLS
        sums_at += GROUPS * M
    total = acc.to(tl.float32)
    if CHAIN == 0:
        if HAS_SUMS:
            # the sums are those of whole rows, which one split adds
            sums = tl.load(sums_at, mask=(rows < M) & (split == 0), other=0.0)
            total += _offset(zero_at, sums, OFFSET, FACTOR, HAS_ZERO, LOAD_ZERO)
        total *= _scales(scale_at, LOAD_SCALE)[:, None]

    col = col_tile * COLS + cols
    total *= FACTOR
    if HAS_X_ZERO:
        # the sums are those of whole rows here too
        x_zero = tl.load(x_zero_ptr + rows, mask=(rows < M) & (split == 0), other=128)
        x_zero = x_zero.to(tl.float32) - 128.0
        total -= tl.load(row_sums_ptr + col)[:, None] * x_zero[None, :]
    total *= tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)[None, :]

    out_at = out_ptr + rows[None, :].to(tl.int64) * N + col[:, None]
    inside = present & (col[:, None] < N)
    at = row_tile * tl.num_programs(0) + col_tile
    finish(
        total, out_at, inside, bias_ptr, partial_ptr, lock_ptr, split, at, cols, col, N,
        ROWS, COLS, SPLITS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _numbers(row_at, inner, x_ptr, PLANES: tl.constexpr, ASM: tl.constexpr):
    """A tensor for each plane of a tile, in the type of the activations."""
    element = x_ptr.dtype.element_ty
    if ASM is None:
        planes = ()
        for j in tl.static_range(PLANES):
            # the word of four neighbouring columns, and a byte for each of them
            words = tl.load(row_at + (inner // 4 * 4 + j // 2)[None, :])
            codes = words >> (inner % 4 * 8 + j % 2 * 4)[None, :]
            if element == tl.int8:
                numbers = (codes << 4).to(tl.int8)
            else:
                numbers = (codes & 15).to(tl.uint8).to(element, bitcast=True)
            planes += (numbers,)
    else:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [tl.load(row_at + inner[None, :])],
            dtype=(element,) * 8,
            is_pure=True,
            pack=4,
        )
    return planes


@triton.jit
def _to_float(sums, TO_FLOAT: tl.constexpr):
    """Sums in int32 as float32; a text does it where the converter is slow."""
    if TO_FLOAT is None:
        numbers = sums.to(tl.float32)
    else:
        numbers = tl.inline_asm_elementwise(
            TO_FLOAT, "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1
        )
    return numbers


@triton.jit
def _offset(
    zero_at,
    sums,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    LOAD: tl.constexpr,
):
    """What products with (value - OFFSET) / FACTOR lack of those with values, less zero points."""
    sums = sums[None, :] * (1.0 / FACTOR)
    if HAS_ZERO:
        missing = _zeros(zero_at, OFFSET, LOAD)[:, None] * sums
    else:
        missing = OFFSET * sums
    return missing
