"""Products of activations with 4-bit weights in planes; see `ao_kernels.triton.plane16` for the layout."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "tiles", "tiles_a_split"])
def linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
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
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_ZERO: tl.constexpr,
):
    """The product x (M, K) @ weight.T + bias: one block for ROWS × COLS of it and a part of K.

    A tile of weights is COLS rows by 4 planes of PLANE columns; CHAIN planes share a scale, or all of a
    row does where CHAIN is 0. The weights are the left operand, which the tensor cores take from
    registers. Products are of code - 8, and are scaled in float32; with zero points z, (8 - z) times
    the sum of a group's activations, from `sums_ptr` (groups, M), is added before.

    ASM, LOAD_SCALE and LOAD_ZERO are texts of `ao_kernels.triton.assembly`; where they are None, plain
    operations do the same.
    """
    col_tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tile = tl.program_id(2)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inner = tl.arange(0, PLANE)
    first = split * tiles_a_split
    last = tl.minimum(first + tiles_a_split, tiles)

    GROUPS: tl.constexpr = 4 // CHAIN if CHAIN else 0
    block = col_tile.to(tl.int64) * tiles + first
    grid = block * GROUPS if CHAIN else col_tile
    words_at = w_ptr + block * (COLS * PLANE) + cols[:, None] * PLANE + inner[None, :]
    scale_at = scale_ptr + grid * COLS + cols
    zero_at = zero_ptr + grid * COLS + cols
    sums_at = sums_ptr + first * GROUPS * stride_sums + rows
    x_at = x_ptr + rows[None, :].to(tl.int64) * stride_x + first * (4 * PLANE) + inner[:, None]
    present = rows[None, :] < M

    acc = tl.zeros((COLS, ROWS), tl.float32)
    for tile in range(first, last):
        planes = _numbers(tl.load(words_at), x_ptr, ASM)
        left = K - tile * (4 * PLANE)
        if CHAIN == 0:
            for j in tl.static_range(4):
                x = _activations(x_at, j, inner, left, present, PLANE, EVEN_K)
                acc = tl.dot(planes[j], x, acc)
        else:
            for group in tl.static_range(GROUPS):
                part = tl.zeros((COLS, ROWS), tl.float32)
                for j in tl.static_range(CHAIN):
                    x = _activations(x_at, group * CHAIN + j, inner, left, present, PLANE, EVEN_K)
                    part = tl.dot(planes[group * CHAIN + j], x, part)
                if HAS_ZERO:
                    zero = _zeros(zero_at + group * COLS, LOAD_ZERO)
                    sums = tl.load(sums_at + group * stride_sums, mask=rows < M, other=0.0)
                    part += zero[:, None] * sums[None, :]
                acc += part * _scales(scale_at + group * COLS, LOAD_SCALE)[:, None]
        words_at += COLS * PLANE
        x_at += 4 * PLANE
        scale_at += GROUPS * COLS
        zero_at += GROUPS * COLS
        sums_at += GROUPS * stride_sums
    if CHAIN == 0:
        if HAS_ZERO:
            # the sums are those of whole rows, which one split adds
            sums = tl.load(sums_at, mask=(rows < M) & (split == 0), other=0.0)
            acc += _zeros(zero_at, LOAD_ZERO)[:, None] * sums[None, :]
        acc *= _scales(scale_at, LOAD_SCALE)[:, None]

    col = col_tile * COLS + cols
    out_at = out_ptr + rows[None, :].to(tl.int64) * N + col[:, None]
    inside = present & (col[:, None] < N)
    if SPLITS == 1:
        _store(out_at, inside, acc, bias_ptr, col, N, HAS_BIAS)
    else:
        place = row_tile * tl.num_programs(0) + col_tile
        within = cols[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        parts_at = partial_ptr + place.to(tl.int64) * (SPLITS * COLS * ROWS) + within
        tl.store(parts_at + split * (COLS * ROWS), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(lock_ptr + place, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            # all parts are there, and are always summed in the same order
            total = tl.zeros((COLS, ROWS), tl.float32)
            for i in range(SPLITS):
                total += tl.load(parts_at + i * (COLS * ROWS), cache_modifier=".cg")
            _store(out_at, inside, total, bias_ptr, col, N, HAS_BIAS)
            tl.store(lock_ptr + place, 0)


@triton.jit
def _activations(x_at, plane, inner, left, present, PLANE: tl.constexpr, EVEN_K: tl.constexpr):
    """One plane's activations, PLANE × ROWS; what is outside is 0."""
    if not EVEN_K:
        present = present & (plane * PLANE + inner[:, None] < left)
    return tl.load(x_at + plane * PLANE, mask=present, other=0.0)


@triton.jit
def _scales(at, LOAD: tl.constexpr):
    """The scales of COLS rows in float32, each thread loading those of its own rows.

    A plain load would be done once a row, and then go to all threads through shared memory.
    """
    if LOAD is None:
        scale = tl.load(at)
    elif at.dtype.element_ty == tl.float32:
        scale = _load(at, LOAD, "=r,l")
    else:
        scale = _load(at, LOAD, "=h,l")
    return scale.to(tl.float32)


@triton.jit
def _load(at, LOAD: tl.constexpr, CONSTRAINTS: tl.constexpr):
    return tl.inline_asm_elementwise(
        LOAD, CONSTRAINTS, [at.to(tl.int64)], dtype=at.dtype.element_ty, is_pure=True, pack=1
    )


@triton.jit
def _zeros(at, LOAD: tl.constexpr):
    """8 - the zero points of COLS rows in float32, loaded as scales are."""
    if at.dtype.element_ty != tl.uint8:
        offset = 8.0 - _scales(at, LOAD)
    else:
        if LOAD is None:
            zero = tl.load(at).to(tl.int32)
        else:
            zero = tl.inline_asm_elementwise(
                LOAD, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
        # a small integer in the last bits of 2**23 is that much more: no conversion is needed
        offset = 8388616.0 - (zero | 0x4B000000).to(tl.float32, bitcast=True)
    return offset


@triton.jit
def _numbers(words, x_ptr, ASM: tl.constexpr):
    """Four tensors, one a plane, of code - 8 in the type of the activations."""
    element = x_ptr.dtype.element_ty
    if ASM is None:
        planes = (
            ((words & 15) - 8).to(element),
            ((words >> 4 & 15) - 8).to(element),
            ((words >> 8 & 15) - 8).to(element),
            ((words >> 12 & 15) - 8).to(element),
        )
    else:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(element, element, element, element),
            is_pure=True,
            pack=2,
        )
    return planes


@triton.jit
def _store(at, inside, acc, bias_ptr, col, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[:, None]
    tl.store(at, acc.to(at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def group_sums(
    x_ptr,
    out_ptr,
    M,
    K,
    stride_x,
    stride_out,
    group,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sums of each `group` neighbouring columns of x (M, K), to float32 (groups, M)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * group
    last = tl.minimum(first + group, K)
    inner = tl.arange(0, STEP)
    total = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(first, last, STEP):
        cols = start + inner
        at = x_ptr + rows[:, None].to(tl.int64) * stride_x + cols[None, :]
        inside = (rows[:, None] < M) & (cols[None, :] < last)
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + tl.program_id(1) * stride_out + rows
    tl.store(out_at, tl.sum(total, 1), mask=rows < M)


@triton.jit
def dequantize(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    tiles,
    COLS: tl.constexpr,
    PLANE: tl.constexpr,
    CHAIN: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Dense values (N, K): (code - zero) * scale in float32, rounded once; one block for a tile."""
    col_tile = tl.program_id(0)
    tile = tl.program_id(1)
    cols = tl.arange(0, COLS)
    inner = tl.arange(0, PLANE)
    block = col_tile.to(tl.int64) * tiles + tile
    words = tl.load(w_ptr + block * (COLS * PLANE) + cols[:, None] * PLANE + inner[None, :])
    col = col_tile * COLS + cols
    for j in tl.static_range(4):
        grid = block * (4 // CHAIN) + j // CHAIN if CHAIN else col_tile
        code = ((words >> 4 * j) & 15).to(tl.float32)
        if HAS_ZERO:
            code -= tl.load(zero_ptr + grid * COLS + cols).to(tl.float32)[:, None]
        else:
            code -= 8
        value = code * tl.load(scale_ptr + grid * COLS + cols).to(tl.float32)[:, None]
        k = tile * (4 * PLANE) + j * PLANE + inner
        out_at = out_ptr + col[:, None].to(tl.int64) * K + k[None, :]
        inside = (col[:, None] < N) & (k[None, :] < K)
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)
