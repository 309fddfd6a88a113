"""Unpacking of weights: the numbers of each plane of a tile, and the K that they belong to."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.weight_only import float4_ptx

#: where the codes of floats of 4 bits lie
PLACES = tl.constexpr(float4_ptx.PLACES)


@triton.jit
def k_of(plane, tile_k, PLANE_K: tl.constexpr, SPARSE: tl.constexpr):
    """The K of a tile that a plane has: SPARSE, two of every four of 32, otherwise neighbours."""
    if SPARSE:
        plane += tile_k // PLANE_K
        k = plane // 2 * 32 + plane % 2 * 2 + tile_k % PLANE_K // 2 * 4 + tile_k % 2
        k = tl.max_contiguous(tl.multiple_of(k, 2), 2)
    else:
        k = plane * PLANE_K + tile_k
    return k


@triton.jit
def numbers(
    w_at,
    tile_k,
    x_ptr,
    table_ptr,
    NEXT: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tensor for each plane of a tile's numbers, in the type of the activations; words are NEXT apart."""
    element = x_ptr.dtype.element_ty
    planes = ()
    if ASM is None:
        for j in tl.static_range(PLANES):
            value = values(w_at, tile_k, j, table_ptr, NEXT, WORDS, PLANES, ORDER, SPARSE)
            planes += ((value - OFFSET).to(element),)
    else:
        at, words = w_at + tile_k[None, :], ()
        for word in tl.static_range(WORDS):
            words += (tl.load(at + word * NEXT),)
        CONSTRAINTS: tl.constexpr = "=&r," * PLANES + "r," * (WORDS - 1) + "r"
        planes = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, words, dtype=(element,) * PLANES, is_pure=True, pack=2
        )
    return planes


@triton.jit
def values(
    w_at,
    tile_k,
    plane,
    table_ptr,
    NEXT: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """The values of one plane in float32, without assembly; words are NEXT apart."""
    if SPARSE:
        code = sparse_codes(w_at, tile_k, plane, NEXT)
    else:
        code = codes(w_at, tile_k, plane, NEXT, WORDS, PLANES, ORDER)
    return tl.load(table_ptr + code).to(tl.float32, bitcast=True)


@triton.jit
def codes(
    w_at,
    tile_k,
    plane,
    NEXT: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    ORDER: tl.constexpr,
):
    """The codes of one plane: without assembly, what `words.unpack_words` does; words are NEXT apart."""
    BITS: tl.constexpr = 16 * WORDS // PLANES
    CONTAINER: tl.constexpr = 1 if BITS == 1 else 2 if BITS == 2 else 4 if BITS <= 4 else 8
    PER: tl.constexpr = 16 // CONTAINER
    REST: tl.constexpr = CONTAINER - BITS
    number, low = plane // PER, plane % PER * CONTAINER
    at = tile_k
    if ORDER == "pairs":
        # nibble i of words h = 0 and 1 is nibble 2i + h of both
        nibble = 2 * (low // 4) + tile_k % 2
        at = tile_k - tile_k % 2 + nibble // 4
        low = nibble % 4 * 4 + low % 4
    if ORDER == "spread":
        code = spread_codes(w_at, tile_k, plane)
    elif number < WORDS:
        code = tl.load(w_at + number * NEXT + at[None, :]).to(tl.int32) >> low
    else:
        code = tl.zeros((w_at.shape[0], tile_k.shape[0]), tl.int32)
        for word in tl.static_range(WORDS):
            stored = tl.load(w_at + word * NEXT + at[None, :]).to(tl.int32) >> low
            code |= (stored >> BITS & ((1 << REST) - 1)) << REST * word
        code = code >> BITS * (number - WORDS)
    return code & ((1 << BITS) - 1)


@triton.jit
def spread_codes(w_at, tile_k, plane):
    """The codes of one plane of floats of 4 bits, whose bits lie in `float4_ptx.PLACES`."""
    own = tl.load(w_at + tile_k[None, :]).to(tl.int32) & 0xFFFF
    words = own | tl.load(w_at + (tile_k ^ 1)[None, :]).to(tl.int32) << 16
    bits = ()
    for bit in tl.static_range(4):
        bits += ((words >> PLACES[plane][bit] & 1) << bit,)
    return bits[0] | bits[1] | bits[2] | bits[3]


@triton.jit
def sparse_codes(w_at, tile_k, plane, NEXT: tl.constexpr):
    """The codes of one plane, 8 where none is kept: without assembly, what `assembly.two_of_four` does."""
    group = plane // 2
    at = w_at + (tile_k // 2 * 2 + group % 2)[None, :]
    codes = tl.load(at + group // 4 * NEXT).to(tl.int32) >> group // 2 % 2 * 4
    pattern = tl.load(at + 2 * NEXT).to(tl.int32) >> group // 2 * 4 & 7
    first = tl.where(pattern < 3, 0, tl.where(pattern < 5, 1, 2))
    second = tl.where(pattern == 0, 1, tl.where((pattern == 1) | (pattern == 3), 2, 3))
    k_of = (plane % 2 * 2 + tile_k % 2)[None, :]
    return tl.where(first == k_of, codes & 15, tl.where(second == k_of, codes >> 8 & 15, 8))
