"""Products of activations in 8 bits with weights in 4; see `ao_kernels.triton.w4a8.layout` for the layout."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_operands import beside, load_scales
from ao_kernels.triton.shared.kernel_prefetch import bring_weights
from ao_kernels.triton.shared.kernel_split_k import finish


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
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The product x (M, K) @ weight.T + bias: one block for ROWS × COLS of it and a part of K.

    `x_ptr` has codes, int8 or float8, with scales of rows; with HAS_X_ZERO those are uint8 codes less 128,
    and rows have zero points. CHAIN planes share a scale of the weight, or all of a row does where CHAIN is
    0. The weights are the left operand, which the tensor cores take from registers: as (value - OFFSET) /
    FACTOR. With zero points, `x_sums_ptr` has the sums of each group's activations (groups, M).

    ASM, TO_FLOAT and LOAD_SCALE are texts of `ao_kernels.triton.shared.ptx`; where one is None, plain
    operations do the same. With AHEAD, PREFETCH brings so many tiles nearer while the kernel before
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
    AT_ONCE: tl.constexpr = CHAIN if CHAIN else PLANES
    GROUPS: tl.constexpr = PLANES // CHAIN if CHAIN else 0
    block = col_tile.to(tl.int64) * tiles + first
    grid = block * GROUPS if CHAIN else col_tile
    several = tl.arange(0, AT_ONCE * PLANE)
    row_at = w_ptr + block * (COLS * PLANE) + cols[:, None] * PLANE
    scale_at = scale_ptr + grid * COLS + cols
    x_at = x_ptr + rows[None, :].to(tl.int64) * stride_x + first * (PLANES * PLANE)
    present = rows[None, :] < M

    if AHEAD:
        bring_weights(
            w_ptr, col_tile, split, tiles, tiles_a_split, 1, COLS * PLANE, PREFETCH, AHEAD
        )
    acc = tl.zeros((COLS, ROWS), tl.int32 if INTEGERS and CHAIN == 0 else tl.float32)
    for tile in range(first, last):
        # codes that have no zero points are signed
        planes = _numbers(row_at, inner, x_ptr, PLANES, not HAS_ZERO, ASM)
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
                part = _products(w, x, INTEGERS, TO_FLOAT)
                acc += part * load_scales(scale_at + group * COLS, LOAD_SCALE)[:, None]
        row_at += COLS * PLANE
        x_at += PLANES * PLANE
        scale_at += GROUPS * COLS
    total = acc.to(tl.float32) * FACTOR
    if HAS_ZERO and CHAIN:
        total = _add_offsets(
            total, scale_ptr, zero_ptr, x_sums_ptr, col_tile.to(tl.int64) * tiles * GROUPS,
            first * GROUPS, last * GROUPS, cols, rows, M, COLS, OFFSET,
        )  # fmt: skip
    if CHAIN == 0:
        if HAS_ZERO:
            # the sums are those of whole rows, which one split adds
            sums = tl.load(x_sums_ptr + rows, mask=(rows < M) & (split == 0), other=0.0)
            zero_point = tl.load(zero_ptr + col_tile * COLS + cols).to(tl.float32)
            total += (OFFSET - zero_point)[:, None] * sums[None, :]
        total *= load_scales(scale_at, LOAD_SCALE)[:, None]

    col = col_tile * COLS + cols
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
def _numbers(row_at, inner, x_ptr, PLANES: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr):
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
                numbers = _small_floats(codes, SIGNED).to(element, bitcast=True)
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
def _small_floats(codes, SIGNED: tl.constexpr):
    """The bits of e4m3 that `assembly.lower_nibbles` and `signed_nibbles` give."""
    bits = codes & 15
    if SIGNED:
        bits = (codes & 7) + (codes >> 3 & 1) * 129
    return bits.to(tl.uint8)


@triton.jit
def _products(w, x, INTEGERS: tl.constexpr, TO_FLOAT: tl.constexpr):
    """The sums of a group in float32; a text converts them where the converter is slow."""
    if not INTEGERS:
        part = tl.dot(w, x)
    elif TO_FLOAT is None:
        part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
    else:
        part = tl.inline_asm_elementwise(
            TO_FLOAT,
            "=r,r",
            [tl.dot(w, x, out_dtype=tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return part


@triton.jit
def _add_offsets(
    total,
    scale_ptr,
    zero_ptr,
    sums_ptr,
    grid,
    first,
    last,
    cols,
    rows,
    M,
    COLS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """What products with values less OFFSET lack of those with values less zero points.

    Of each group from `first` to `last` that is (OFFSET - zero) · scale times the sum of its activations: a
    product of matrices with a column for each group, which is small. `grid` is the first group of the rows
    `cols` of the weight.
    """
    some = tl.arange(
        0, 16
    )  # as few as a product can have: more would take registers from the loop before
    for start in tl.range(first, last, 16, num_stages=1):
        group = start + some
        inside = (group < last)[:, None]
        at = (grid + group)[:, None] * COLS + cols[None, :]
        zero_point = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
        sums_at = sums_ptr + group.to(tl.int64)[:, None] * M + rows[None, :]
        sums = tl.load(sums_at, mask=inside & (rows < M)[None, :], other=0.0)
        # three products in TF32 are as good as one in float32
        offsets = tl.trans((OFFSET - zero_point) * scale)
        total = tl.dot(offsets, sums, total, input_precision="tf32x3")
    return total
