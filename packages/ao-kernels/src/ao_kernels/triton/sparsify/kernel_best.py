"""The best of all patterns of a 4 × 4 tile, two of four in each row and each column."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.constexpr_function
def _bit(row, col):
    """Of an element of a tile: its place in the lower 16 bits by rows, in the upper by columns."""
    bits = 1 << (4 * row + col) | 1 << (16 + 4 * col + row)
    return bits - (1 << 32) if bits >= 1 << 31 else bits


@triton.constexpr_function
def _pair(k):
    """The k-th of the six pairs of columns; the others of pair k are pair 5 - k."""
    return ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))[k]


@triton.constexpr_function
def _bits(row, k):
    """Both columns of pair k."""
    first, second = _pair(k)
    bits = (_bit(row, first) | _bit(row, second)) & 0xFFFFFFFF
    return bits - (1 << 32) if bits >= 1 << 31 else bits


@triton.jit
def _greater(sum, bits, other_sum, other_bits):
    """The greater sum and its bits; of equal ones the first."""
    greater = other_sum > sum
    return tl.where(greater, other_sum, sum), tl.where(greater, other_bits, bits)


@triton.jit
def best(lines, H: tl.constexpr, x_ptr):
    """The eight elements of a tile, two in each row and column, whose magnitudes have the greatest sum.

    By how often each column is chosen in the upper two rows, the 90 patterns are: once each (6 × 6); two
    columns twice (6); one twice, two once (6 pairs of those, for which either half and the columns that are
    left have two ways each: 48). Bits are those of `_bit`.
    """
    x = ()
    for r in tl.static_range(4):
        if x_ptr.dtype.element_ty == tl.float32:
            line = ()
            for c in tl.static_range(4):
                line += (_bounded((lines[r][4 * H + c] & 0x7FFFFFFF).to(tl.float32, bitcast=True)),)
            x += (line,)
        else:
            low, high = lines[r][2 * H], lines[r][2 * H + 1]
            x += (_magnitudes(low, x_ptr) + _magnitudes(high, x_ptr),)
    upper, lower = (), ()
    for c in tl.static_range(4):
        upper += (x[0][c] + x[1][c],)
        lower += (x[2][c] + x[3][c],)

    sum, bits = _once(x, 0)
    other_sum, other_bits = _once(x, 2)
    sum += other_sum
    bits |= other_bits
    for k in tl.static_range(6):
        s, bs = _unlike(x, upper, lower, _pair(k)[0], _pair(k)[1], _pair(5 - k)[0], _pair(5 - k)[1])
        sum, bits = _greater(sum, bits, s, bs)
        twice = (upper[_pair(k)[0]] + upper[_pair(k)[1]]) + (
            lower[_pair(5 - k)[0]] + lower[_pair(5 - k)[1]]
        )
        sum, bits = _greater(
            sum, bits, twice, _bits(0, k) | _bits(1, k) | _bits(2, 5 - k) | _bits(3, 5 - k)
        )
    return bits


@triton.jit
def _magnitudes(word, x_ptr):
    """Both elements' magnitudes in float32; NaN and what is huge count so much that eight have a sum."""
    if x_ptr.dtype.element_ty == tl.bfloat16:
        first = (word << 16 & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        second = (word & 0x7FFF0000).to(tl.float32, bitcast=True)
    else:
        first = (word & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (word >> 16 & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return _bounded(first), _bounded(second)


@triton.jit
def _bounded(magnitude):
    """At most 2**124, NaN too; as integers they have the same order."""
    bits = tl.minimum(magnitude.to(tl.int32, bitcast=True), 0x7D800000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _either(sum, BITS: tl.constexpr, other_sum, OTHER: tl.constexpr):
    greater = other_sum > sum
    return tl.where(greater, other_sum, sum), tl.where(greater, OTHER, BITS)


@triton.jit
def _once(x, R: tl.constexpr):
    """Rows R and R + 1 have each column once: a pair, and the other pair."""
    sum = (x[R][0] + x[R][1]) + (x[R + 1][2] + x[R + 1][3])
    bits = tl.full(sum.shape, _bits(R, 0) | _bits(R + 1, 5), tl.int32)
    for k in tl.static_range(1, 6):
        other = (x[R][_pair(k)[0]] + x[R][_pair(k)[1]]) + (
            x[R + 1][_pair(5 - k)[0]] + x[R + 1][_pair(5 - k)[1]]
        )
        sum, bits = _greater(sum, bits, other, _bits(R, k) | _bits(R + 1, 5 - k))
    return sum, bits


@triton.jit
def _unlike(x, upper, lower, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Either half has columns a and b once; of c and d one is twice in the upper, the other in the lower."""
    sum, bits = _crossed(x, 0, 1, a, b)
    other, other_bits = _crossed(x, 2, 3, a, b)
    C: tl.constexpr = _bit(0, c) | _bit(1, c) | _bit(2, d) | _bit(3, d)
    D: tl.constexpr = _bit(0, d) | _bit(1, d) | _bit(2, c) | _bit(3, c)
    twice, twice_bits = _either(upper[c] + lower[d], C, upper[d] + lower[c], D)
    return (sum + other) + twice, bits | other_bits | twice_bits


@triton.jit
def _crossed(x, R: tl.constexpr, S: tl.constexpr, b: tl.constexpr, c: tl.constexpr):
    """One of two columns from row R, the other from row S."""
    return _either(
        x[R][b] + x[S][c], _bit(R, b) | _bit(S, c), x[R][c] + x[S][b], _bit(R, c) | _bit(S, b)
    )
