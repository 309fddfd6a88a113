"""Keys and values of a block of tokens, as codes; rotations; columns that are dealt out and put together."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def decoded(
    words,
    table_ptr,
    like_ptr,
    PLANES: tl.constexpr,
    FLIP: tl.constexpr,
    OFFSET: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tensor for each plane of words of 16 bits: of each word code j, as a number minus OFFSET.

    PLANES codes are in a word. An exclusive or with FLIP makes it one of the codes that `table_ptr` has the
    values of. ASM is PTX; where it is None, the values are looked up.
    """
    element = like_ptr.dtype.element_ty
    planes = ()
    if FLIP:
        words = words ^ FLIP
    if ASM is None:
        BITS: tl.constexpr = 16 // PLANES
        for j in tl.static_range(PLANES):
            code = words.to(tl.int32) >> BITS * j & (1 << BITS) - 1
            planes += ((tl.load(table_ptr + code) - OFFSET).to(element),)
    else:
        CONSTRAINTS: tl.constexpr = "=&r," * PLANES + "r"
        planes = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [words], dtype=(element,) * PLANES, is_pure=True, pack=2
        )
    return planes


@triton.jit
def scaled(x, at, inside, scale_ptr, zero_ptr, OFFSET: tl.constexpr, FMA: tl.constexpr):
    """Numbers less OFFSET in rows whose scales and zero points are `at`: rounded once, to the type of x."""
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.zeros(scale.shape, tl.float32) + OFFSET
    if zero_ptr is not None:
        zero = OFFSET - tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
    if FMA is None:
        y = (x.to(tl.float32) * scale[:, None] + (zero * scale)[:, None]).to(x.dtype)
    else:
        by, more = scale.to(x.dtype)[:, None], (zero * scale).to(x.dtype)[:, None]
        y = tl.inline_asm_elementwise(
            FMA, "=r,r,r,r", [x, by, more], dtype=x.dtype, is_pure=True, pack=2
        )
    return y


@triton.jit
def dealt_out(x, GROUPS: tl.constexpr, PLANES: tl.constexpr):
    """The planes of each group of neighbouring columns of x: column PLANES · i + j is column i of plane j."""
    M: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    words = tl.reshape(x, (M, GROUPS, SIZE // (GROUPS * PLANES), PLANES))
    return _pieces(tl.reshape(tl.permute(words, (0, 1, 3, 2)), (M, SIZE)), GROUPS * PLANES)


@triton.jit
def _pieces(x, COUNT: tl.constexpr):
    M: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    if COUNT == 1:
        found = (x,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (M, 2, HALF)), (0, 2, 1)))
        found = _pieces(left, COUNT // 2) + _pieces(right, COUNT // 2)
    return found


@triton.jit
def interleaved(x, GROUPS: tl.constexpr, PLANES: tl.constexpr):
    """Inverse of `dealt_out`, of all planes one behind the other."""
    M: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    planes = tl.reshape(x, (M, GROUPS, PLANES, SIZE // (GROUPS * PLANES)))
    return tl.reshape(tl.permute(planes, (0, 1, 3, 2)), (M, SIZE))


@triton.jit
def rotated(x, ROUNDS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """The Hadamard transform of every 2**ROUNDS columns of x, which is its own inverse.

    x is multiplied by BEFORE and sums by AFTER.
    """
    M: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    POWER: tl.constexpr = 1 << ROUNDS
    ROWS: tl.constexpr = M * SIZE // POWER
    y = tl.reshape(x * BEFORE, (ROWS, POWER))
    for _ in tl.static_range(ROUNDS):
        # the lowest bit of the place goes to the top: after all rounds each is where it was
        even, odd = tl.split(tl.reshape(y, (ROWS, POWER // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, POWER))
    return tl.reshape(y, (M, SIZE)) * AFTER
