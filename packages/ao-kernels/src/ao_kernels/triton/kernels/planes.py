"""What tiles of planes hold: the numbers of each, and the columns that they belong to."""

import triton
import triton.language as tl

from ao_kernels.triton import float4

#: where the codes of floats of 4 bits lie
PLACES = tl.constexpr(float4.PLACES)


@triton.jit
def beside(planes, first: tl.constexpr, COUNT: tl.constexpr):
    """Planes side by side."""
    if COUNT == 1:
        both = planes[first]
    else:
        HALF: tl.constexpr = COUNT // 2
        both = tl.join(beside(planes, first, HALF), beside(planes, first + HALF, HALF))
        both = tl.permute(both, (0, 2, 1))
        both = tl.reshape(both, (both.shape[0], both.shape[1] * both.shape[2]))
    return both


@triton.jit
def column(plane, inner, PLANE: tl.constexpr, SPARSE: tl.constexpr):
    """The columns of a tile that a plane has: SPARSE, two of every four of 32, otherwise neighbours."""
    if SPARSE:
        plane += inner // PLANE
        column = plane // 2 * 32 + plane % 2 * 2 + inner % PLANE // 2 * 4 + inner % 2
        column = tl.max_contiguous(tl.multiple_of(column, 2), 2)
    else:
        column = plane * PLANE + inner
    return column


@triton.jit
def numbers(
    row_at,
    inner,
    x_ptr,
    table_ptr,
    COLS: tl.constexpr,
    PLANES: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tensor for each plane of a tile's numbers, in the type of the activations."""
    element = x_ptr.dtype.element_ty
    if ASM is None:
        planes = ()
        for j in tl.static_range(PLANES):
            value = values(row_at, inner, j, table_ptr, COLS, PLANES, ORDER, SPARSE)
            planes += ((value - OFFSET).to(element),)
    elif SPARSE:
        at, NEXT = row_at + inner[None, :], COLS * inner.shape[0]
        planes = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [tl.load(at), tl.load(at + NEXT), tl.load(at + 2 * NEXT)],
            dtype=(element,) * 16,
            is_pure=True,
            pack=2,
        )
    elif PLANES == 4:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,r",
            [tl.load(row_at + inner[None, :])],
            dtype=(element, element, element, element),
            is_pure=True,
            pack=2,
        )
    else:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,r",
            [tl.load(row_at + inner[None, :])],
            dtype=(element, element),
            is_pure=True,
            pack=2,
        )
    return planes


@triton.jit
def values(
    row_at,
    inner,
    plane,
    table_ptr,
    COLS: tl.constexpr,
    PLANES: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """The values of one plane in float32, without assembly."""
    if SPARSE:
        code = sparse_codes(row_at, inner, plane, COLS * inner.shape[0])
    else:
        BITS: tl.constexpr = 16 // PLANES
        if ORDER == "spread":
            own = tl.load(row_at + inner[None, :]).to(tl.int32) & 0xFFFF
            words = own | tl.load(row_at + (inner ^ 1)[None, :]).to(tl.int32) << 16
            codes = ()
            for bit in tl.static_range(4):
                codes += ((words >> PLACES[plane][bit] & 1) << bit,)
            words = codes[0] | codes[1] | codes[2] | codes[3]
        elif ORDER == "pairs":
            # codes of two words in the order of planes, those of a plane beside each other
            code = 2 * plane % PLANES + inner % 2
            word = inner - inner % 2 + 2 * plane // PLANES
            words = tl.load(row_at + word[None, :]) >> (BITS * code)[None, :]
        else:
            words = tl.load(row_at + inner[None, :]) >> BITS * plane
        code = words & ((1 << BITS) - 1)
    return tl.load(table_ptr + code).to(tl.float32, bitcast=True)


@triton.jit
def sparse_codes(row_at, inner, plane, NEXT: tl.constexpr):
    """The codes of one plane, 8 where none is kept: without assembly, what `assembly.two_of_four` does."""
    group = plane // 2
    at = row_at + (inner // 2 * 2 + group % 2)[None, :]
    codes = tl.load(at + group // 4 * NEXT).to(tl.int32) >> group // 2 % 2 * 4
    pattern = tl.load(at + 2 * NEXT).to(tl.int32) >> group // 2 * 4 & 7
    first = tl.where(pattern < 3, 0, tl.where(pattern < 5, 1, 2))
    second = tl.where(pattern == 0, 1, tl.where((pattern == 1) | (pattern == 3), 2, 3))
    column = (plane % 2 * 2 + inner % 2)[None, :]
    return tl.where(first == column, codes & 15, tl.where(second == column, codes >> 8 & 15, 8))
