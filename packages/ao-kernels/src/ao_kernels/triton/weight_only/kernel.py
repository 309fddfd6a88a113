"""Products of activations with weights in planes; see `ao_kernels.triton.weight_only.layout` for the layout."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_operands import beside, load_scales
from ao_kernels.triton.shared.kernel_prefetch import bring_weights
from ao_kernels.triton.shared.kernel_split_k import finish
from ao_kernels.triton.weight_only.kernel_codes import column, numbers
from ao_kernels.triton.weight_only.kernel_scales import neighbours

#: columns of planes beside each other
_BESIDE = tl.constexpr(128)


@triton.jit(do_not_specialize=["M", "tiles", "tiles_a_split"])
def linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    table_ptr,
    sums_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    M,
    N,
    K,
    stride_x,
    stride_sums,
    tiles,
    tiles_a_split,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The product x (M, K) @ weight.T + bias: one block for ROWS × COLS of it and a part of K.

    A tile of weights is COLS rows by PLANES planes of PLANE columns, in WORDS words (see `Plane16`, and with
    SPARSE `Plane24`); CHAIN planes share a scale, or all of a row does where CHAIN is 0. The weights are the
    left operand, which the tensor cores take from registers. Products are of value - OFFSET, and are scaled
    in float32, with HAS_OUTER in the end by the scale of scales too; scales of 8 bits are in the format
    SCALE. With zero points z, (OFFSET - z) times the sum of a group's activations, from `sums_ptr`
    (groups, stride_sums), is added before: also for rows of a tile that there are not, of no effect.

    ASM and what begins with LOAD are texts of `ao_kernels.triton.shared.ptx`; where ASM is None, plain
    operations do the same, with the values of codes in `table_ptr`. LOAD_TABLE, where there is one, loads
    what stands there from TABLE on. With AHEAD, PREFETCH brings so many tiles nearer while the kernel before
    still runs.
    """
    col_tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tile = tl.program_id(2)
    if AHEAD:
        bring_weights(
            w_ptr, col_tile, split, tiles, tiles_a_split, WORDS, COLS * PLANE, PREFETCH, AHEAD
        )
    product(
        x_ptr, w_ptr, scale_ptr, outer_ptr, zero_ptr, table_ptr, sums_ptr, bias_ptr, out_ptr,
        partial_ptr, lock_ptr,
        row_tile * ROWS, M, col_tile, col_tile, row_tile * tl.num_programs(0) + col_tile, split,
        N, K, stride_x, stride_sums, tiles, tiles_a_split,
        ROWS, COLS, WORDS, PLANES, PLANE, CHAIN, OFFSET, ORDER, SPARSE, SPLITS, SCALE, HAS_OUTER,
        HAS_ZERO, HAS_BIAS, EVEN_K, ASM, LOAD_SCALE, LOAD_ZERO, LOAD_TABLE, TABLE,
    )  # fmt: skip


@triton.jit
def product(
    x_ptr,
    w_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    table_ptr,
    sums_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    row,
    end,
    col_tile,
    weight_tile,
    place,
    split,
    N,
    K,
    stride_x,
    stride_sums,
    tiles,
    tiles_a_split,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
    LOAD_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """What one block of `linear` computes: ROWS × COLS from `row` on and of `col_tile`; `end` ends the rows.

    `weight_tile` is the row of tiles that holds the weights of these columns, and `place` counts what
    blocks compute together (see `finish`).
    """
    rows = row + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inner = tl.arange(0, PLANE)
    first = split * tiles_a_split
    last = tl.minimum(first + tiles_a_split, tiles)

    GROUPS: tl.constexpr = PLANES // CHAIN if CHAIN else 0
    block = weight_tile.to(tl.int64) * tiles + first
    grid = block * GROUPS if CHAIN else weight_tile
    # narrow planes are multiplied several at once: on sm_90 each product waits for the one before
    AT_ONCE: tl.constexpr = min(CHAIN if CHAIN else PLANES, _BESIDE // PLANE) if PLANE < 64 else 1
    several = tl.arange(0, AT_ONCE * PLANE)
    row_at = w_ptr + block * (WORDS * COLS * PLANE) + cols[:, None] * PLANE
    BESIDE: tl.constexpr = GROUPS if CHAIN else 1
    if SCALE is None:
        scale_at = scale_ptr + grid * COLS + cols
    else:
        scale_at = scale_ptr + ((block if CHAIN else grid) * COLS + cols) * BESIDE
    zero_at = zero_ptr + grid * COLS + cols
    sums_at = sums_ptr + first * GROUPS * stride_sums + row + tl.arange(0, ROWS)
    x_at = x_ptr + rows[None, :].to(tl.int64) * stride_x + first * (PLANES * PLANE)
    present = rows[None, :] < end

    if LOAD_TABLE is not None:
        copy_at = table_ptr + TABLE + (tl.arange(0, 32) & 1) * 8
        tl.inline_asm_elementwise(
            LOAD_TABLE, "=r,l", [copy_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    acc = tl.zeros((COLS, ROWS), tl.float32)
    for tile in range(first, last):
        planes = numbers(
            row_at, inner, x_ptr, table_ptr, COLS, WORDS, PLANES, OFFSET, ORDER, SPARSE, ASM
        )
        left = K - tile * (PLANES * PLANE)
        if SCALE is not None and CHAIN:
            by = neighbours(scale_at, BESIDE, SCALE, LOAD_SCALE)
        if CHAIN == 0:
            for j in tl.static_range(0, PLANES, AT_ONCE):
                x = _activations(x_at, j, several, left, present, PLANE, SPARSE, EVEN_K)
                acc = tl.dot(beside(planes, j, AT_ONCE), x, acc)
        else:
            for group in tl.static_range(GROUPS):
                part = tl.zeros((COLS, ROWS), tl.float32)
                for j in tl.static_range(0, CHAIN, AT_ONCE):
                    x = _activations(
                        x_at, group * CHAIN + j, several, left, present, PLANE, SPARSE, EVEN_K
                    )
                    part = tl.dot(beside(planes, group * CHAIN + j, AT_ONCE), x, part)
                if HAS_ZERO:
                    zero_point = _zeros(zero_at + group * COLS, OFFSET, LOAD_ZERO)
                    sums = tl.load(sums_at + group * stride_sums)
                    part += zero_point[:, None] * sums[None, :]
                if SCALE is None:
                    acc += part * load_scales(scale_at + group * COLS, LOAD_SCALE)[:, None]
                else:
                    acc += part * by[group][:, None]
        row_at += WORDS * COLS * PLANE
        x_at += PLANES * PLANE
        scale_at += GROUPS * COLS
        zero_at += GROUPS * COLS
        sums_at += GROUPS * stride_sums
    if CHAIN == 0:
        if HAS_ZERO:
            # the sums are those of whole rows, which one split adds
            sums = tl.load(sums_at, mask=split == 0, other=0.0)
            acc += _zeros(zero_at, OFFSET, LOAD_ZERO)[:, None] * sums[None, :]
        if SCALE is None:
            acc *= load_scales(scale_at, LOAD_SCALE)[:, None]
        else:
            acc *= neighbours(scale_at, 1, SCALE, LOAD_SCALE)[0][:, None]
    if HAS_OUTER:
        acc *= tl.load(outer_ptr)

    col = col_tile * COLS + cols
    out_at = out_ptr + rows[None, :].to(tl.int64) * N + col[:, None]
    stored = present & (col[:, None] < N)
    finish(
        acc, out_at, stored, bias_ptr, partial_ptr, lock_ptr, split, place, cols, col, N,
        ROWS, COLS, SPLITS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _activations(
    x_at,
    plane,
    inner,
    left,
    present,
    PLANE: tl.constexpr,
    SPARSE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One plane's activations, PLANE × ROWS; what is outside is 0."""
    col = column(plane, inner, PLANE, SPARSE)[:, None]
    if not EVEN_K:
        present = present & (col < left)
    return tl.load(x_at + col, mask=present, other=0.0)


@triton.jit
def _zeros(at, OFFSET: tl.constexpr, LOAD: tl.constexpr):
    """OFFSET less the zero points of COLS rows in float32, loaded as scales are."""
    if at.dtype.element_ty != tl.uint8:
        offset = OFFSET - load_scales(at, LOAD)
    else:
        if LOAD is None:
            zero_point = tl.load(at).to(tl.int32)
        else:
            zero_point = tl.inline_asm_elementwise(
                LOAD, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
        # a small integer in the last bits of 2**23 is that much more: no conversion is needed
        offset = 8388608.0 + OFFSET - (zero_point | 0x4B000000).to(tl.float32, bitcast=True)
    return offset
