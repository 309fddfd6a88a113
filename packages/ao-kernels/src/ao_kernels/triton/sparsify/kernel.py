"""2:4 sparsity from dense matrices in one read; see `ao_kernels.triton.sparsify.op`.

Every thread has its own 8 columns, or 8 × 8 elements, in registers: tensors here have one dimension, whose
elements are such pieces. Nothing goes through shared memory.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.sparsify.kernel_best import best


@triton.jit
def rows(
    x_ptr,
    values_ptr,
    index_ptr,
    N,
    K,
    stride,
    groups,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    PICK: tl.constexpr,
):
    """The two of the greatest magnitude of every four of x (N, K); ties to the first, NaN counts as infinity.

    Infinities become the greatest finite number. A block has 256 columns of 4 × STEPS rows. `values_ptr`
    int32 (N, groups), two values in a word; `index_ptr` uint8 (N, ceil(groups / 2)).
    """
    piece = tl.arange(0, 128)
    group = tl.program_id(1) * 64 + piece % 32 * 2
    first = tl.program_id(0) * (4 * STEPS)
    for start in range(first, tl.minimum(first + 4 * STEPS, N), 4):
        row = start + piece // 32
        inside = row < N
        at = x_ptr + row.to(tl.int64) * stride
        values_at = values_ptr + row.to(tl.int64) * groups + group
        low, high = _four(at, group * 4, K, inside, VECTOR)
        first_nibble = _greatest(low, high, x_ptr)
        word = _finite(_pick(low, high, first_nibble, PICK), x_ptr)
        tl.store(values_at, word, mask=inside & (group < groups))
        low, high = _four(at, group * 4 + 4, K, inside, VECTOR)
        nibble = _greatest(low, high, x_ptr)
        word = _finite(_pick(low, high, nibble, PICK), x_ptr)
        tl.store(values_at + 1, word, mask=inside & (group + 1 < groups))
        index_at = index_ptr + row.to(tl.int64) * tl.cdiv(groups, 2) + group // 2
        tl.store(index_at, first_nibble | nibble << 4, mask=inside & (group < groups))


@triton.jit
def tiles(
    x_ptr,
    mask_ptr,
    values_ptr,
    meta_ptr,
    values_t_ptr,
    meta_t_ptr,
    bits_ptr,
    N,
    K,
    stride,
    mask_words,
    rows_padded,
    cols_padded,
    words,
    words_t,
    pieces,
    STEPS: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCKED: tl.constexpr,
    VECTOR: tl.constexpr,
    PICK: tl.constexpr,
):
    """The best eight of each 4 × 4 tile of x (N, K), two in each row and column; see `best`.

    A block has 256 columns of 32 × STEPS rows. With PACKS, for sparse tensor cores, both ways: values as
    int64 words of four, their indices in the order of `_place`, and 16 bits for each tile; otherwise a mask,
    int64 words of 8 bytes, also of float32.
    """
    piece = tl.arange(0, 128)
    down, right = piece % 32 // 8, piece % 8
    col = (tl.program_id(1) * 4 + piece // 32) * 64 + right * 8
    first = tl.program_id(0) * STEPS
    last = tl.cdiv(N, 64) * 2 if PACKS else tl.cdiv(N, 32)
    for step in range(first, tl.minimum(first + STEPS, last)):
        row = step * 32 + down * 8
        upper = _half(x_ptr, row, col, N, K, stride, VECTOR)
        lower = _half(x_ptr, row + 4, col, N, K, stride, VECTOR)
        a = best(upper, 0, x_ptr)
        b = best(upper, 1, x_ptr)
        c = best(lower, 0, x_ptr)
        d = best(lower, 1, x_ptr)
        if PACKS:
            bits = _wide(a & 0xFFFF | b << 16, c & 0xFFFF | d << 16)
            inside = (row < rows_padded) & (col < pieces * 8)
            tl.store(bits_ptr + (row // 8).to(tl.int64) * pieces + col // 8, bits, mask=inside)
            a, b, c, d = _nibbles(a), _nibbles(b), _nibbles(c), _nibbles(d)
            inside = (row < rows_padded) & (col < words * 8)
            at = row.to(tl.int64) * words + col // 8
            place = _place(row, col, down, right, rows_padded, BLOCKED)
            _store_rows(values_ptr + at, words, meta_ptr + place, upper, a, b, inside, PICK)
            at += words * 4
            _store_rows(values_ptr + at, words, meta_ptr + place + 64, lower, c, d, inside, PICK)
            inside = (row < words_t * 8) & (col < cols_padded)
            at = col.to(tl.int64) * words_t + row // 8
            place = _place(col, row, right % 4, down, cols_padded, BLOCKED)
            left = _columns(upper, lower, 0)
            _store_rows(
                values_t_ptr + at, words_t, meta_t_ptr + place, left, a >> 16, c >> 16, inside, PICK
            )
            at += words_t * 4
            left = _columns(upper, lower, 1)
            _store_rows(
                values_t_ptr + at,
                words_t,
                meta_t_ptr + place + 64,
                left,
                b >> 16,
                d >> 16,
                inside,
                PICK,
            )
        else:
            at = mask_ptr + row.to(tl.int64) * mask_words + col // 8
            for r in tl.static_range(8):
                line = (
                    _bytes((a if r < 4 else c) >> r % 4 * 4),
                    _bytes((b if r < 4 else d) >> r % 4 * 4),
                )
                inside = (row + r < N) & (col < mask_words * 8)
                tl.store(at + r * mask_words, _wide(line[0], line[1]), mask=inside)


@triton.jit
def _four(at, col, K, inside, VECTOR: tl.constexpr):
    """Four 16-bit elements from a column on, as two words; what is outside is 0."""
    if VECTOR:
        four = tl.load((at + col).to(tl.pointer_type(tl.int64)), mask=inside & (col < K), other=0)
        low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    else:
        low = _element(at, col, K, inside) | _element(at, col + 1, K, inside) << 16
        high = _element(at, col + 2, K, inside) | _element(at, col + 3, K, inside) << 16
    return low, high


@triton.jit
def _element(at, col, K, inside):
    element = tl.load(at + col, mask=inside & (col < K), other=0.0)
    return element.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _half(x_ptr, row, col, N, K, stride, VECTOR: tl.constexpr):
    """Four rows of 8 columns: (left low, left high, right low, right high) of each; of float32 all 8."""
    lines = ()
    for r in tl.static_range(4):
        at = x_ptr + (row + r).to(tl.int64) * stride
        inside = row + r < N
        if x_ptr.dtype.element_ty == tl.float32:
            line = ()
            for c in tl.static_range(0, 8, 2):
                line += _two(at, col + c, K, inside, VECTOR)
            lines += (line,)
        else:
            left = _four(at, col, K, inside, VECTOR)
            lines += (left + _four(at, col + 4, K, inside, VECTOR),)
    return lines


@triton.jit
def _two(at, col, K, inside, VECTOR: tl.constexpr):
    """Two elements of float32 from a column on, as words; what is outside is 0."""
    if VECTOR:
        two = tl.load((at + col).to(tl.pointer_type(tl.int64)), mask=inside & (col < K), other=0)
        first, second = two.to(tl.int32), (two >> 32).to(tl.int32)
    else:
        first = tl.load(at + col, mask=inside & (col < K), other=0.0)
        second = tl.load(at + col + 1, mask=inside & (col + 1 < K), other=0.0)
        first, second = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    return first, second


@triton.jit
def _greatest(low, high, x_ptr):
    """The places of the two greatest magnitudes of four, the first in the lower two bits.

    What is compared are the integers of their bits, and their places in two bits below.
    """
    INFINITY: tl.constexpr = 0x7F80 if x_ptr.dtype.element_ty == tl.bfloat16 else 0x7C00
    k0 = tl.minimum(low & 0x7FFF, INFINITY) * 4 + 3
    k1 = tl.minimum(low >> 16 & 0x7FFF, INFINITY) * 4 + 2
    k2 = tl.minimum(high & 0x7FFF, INFINITY) * 4 + 1
    k3 = tl.minimum(high >> 16 & 0x7FFF, INFINITY) * 4
    left, right = tl.maximum(k0, k1), tl.maximum(k2, k3)
    rest = tl.maximum(tl.minimum(k0, k1), tl.minimum(k2, k3))
    best = tl.maximum(left, right) & 3
    second = tl.maximum(tl.minimum(left, right), rest) & 3
    # places count down in the keys
    return 15 - (tl.maximum(best, second) | tl.minimum(best, second) << 2)


@triton.jit
def _finite(word, x_ptr):
    """Two elements, the greatest finite number in place of infinity: its bits are one less."""
    INFINITY: tl.constexpr = 0x7F80 if x_ptr.dtype.element_ty == tl.bfloat16 else 0x7C00
    low, high = word & 0x7FFF, word >> 16 & 0x7FFF
    word = tl.where(low == INFINITY, word - 1, word)
    return tl.where(high == INFINITY, word - 0x10000, word)


@triton.jit
def _pick(low, high, nibble, PICK: tl.constexpr):
    """The two of four elements that a nibble names, as one word."""
    first, second = nibble & 3, nibble & 12
    if PICK is None:
        word = _element_of(low, high, first) | _element_of(low, high, second >> 2) << 16
    else:
        # bytes 2p and 2p + 1 for either place
        selector = first * 0x22 + (second * 0x880 + 0x1010)
        word = tl.inline_asm_elementwise(
            PICK, "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _element_of(low, high, place):
    word = tl.where(place < 2, low, high)
    return word >> (place % 2 * 16) & 0xFFFF


@triton.jit
def _nibbles(bits):
    """Of every four bits, of which two are set, their places: the first in the lower two bits."""
    b1, b2, b3 = bits >> 1, bits >> 2, bits >> 3
    one: tl.constexpr = 0x11111111
    low = ~bits & b1 & one | (~bits & ~b1 & one) << 1
    return low | ((b3 | ~b2) & one) << 2 | ((b3 | b2) & one) << 3


@triton.jit
def _columns(upper, lower, H: tl.constexpr):
    """Four columns of 8 rows, as `_half` has rows."""
    lines = ()
    for c in tl.static_range(4):
        line = ()
        for half in tl.static_range(2):
            rows = upper if half == 0 else lower
            for r in tl.static_range(0, 4, 2):
                first, second = rows[r][2 * H + c // 2], rows[r + 1][2 * H + c // 2]
                if c % 2 == 0:
                    line += (first & 0xFFFF | second << 16,)
                else:
                    line += (first >> 16 & 0xFFFF | second & -0x10000,)
        lines += (line,)
    return lines


@triton.jit
def _store_rows(values_at, words, meta_at, lines, left, right, inside, PICK: tl.constexpr):
    """The kept values of four rows of two tiles, and a byte of `_nibbles` for each row."""
    for r in tl.static_range(4):
        first, second = left >> 4 * r & 15, right >> 4 * r & 15
        low = _pick(lines[r][0], lines[r][1], first, PICK)
        high = _pick(lines[r][2], lines[r][3], second, PICK)
        tl.store(values_at + r * words, _wide(low, high), mask=inside)
        tl.store(meta_at + 16 * r, first | second << 4, mask=inside)


@triton.jit
def _place(row, col, down, right, rows, BLOCKED: tl.constexpr):
    """Where a piece's first byte of indices lies; each further row, of eight, is 16 bytes on.

    Tensor cores of sm_80 take, of 32 × 32 elements, 64 words of 16 bits: rows r, r + 8, r + 16, r + 24 follow
    each other, and in each 2 × 2 of words the second and third change places. Those 128 bytes lie below each
    other (CUTLASS), or four below each other and two beside each other in a piece (BLOCKED: cuSPARSELt).
    """
    within = down // 2 * 8 + right // 2 % 2 * 4 + down % 2 * 2 + right % 2
    if BLOCKED:
        block = row // 128 + (col // 64).to(tl.int64) * (rows // 128)
        place = block * 1024 + col // 32 % 2 * 512 + row // 32 % 4 * 128
    else:
        place = (col // 32).to(tl.int64) * (rows * 4) + row // 32 * 128
    return place + within


@triton.jit
def _bytes(bits):
    """Four bits as bytes, 0 or 1."""
    return bits & 1 | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21


@triton.jit
def _wide(low, high):
    return low.to(tl.int64) & 0xFFFFFFFF | high.to(tl.int64) << 32
