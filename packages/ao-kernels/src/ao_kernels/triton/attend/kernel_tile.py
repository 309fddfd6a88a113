"""What a tile of tokens adds to attention: logits, weights, and weighted values."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.attend.kernel_parts import decoded, scaled
from ao_kernels.triton.shared.kernel_operands import concat_planes


@triton.jit
def logits_of(
    planes,
    moved,
    place,
    at,
    end,
    stored,
    key_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    like_ptr,
    memory,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLANES: tl.constexpr,
    FLIP: tl.constexpr,
    OFFSET: tl.constexpr,
    ASM: tl.constexpr,
    FMA: tl.constexpr,
):
    """The products of queries and BLOCK_N keys, whose scales are those of tokens, or of channels."""
    WORDS: tl.constexpr = GROUP // PLANES
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    BLOCK_M: tl.constexpr = planes[0].shape[0]
    inside = place < end
    i = tl.arange(0, WORDS)
    at_words = key_ptr + (stored * memory + place)[None, :] * (DIM // PLANES) + i[:, None]
    total = tl.zeros((BLOCK_M, place.shape[0]), tl.float32)
    blocks = stored * tl.cdiv(memory, TOKENS)
    for g in tl.static_range(GROUPS):
        there = inside[None, :] & (g * WORDS + i < DIM // PLANES)[:, None]
        words = tl.load(at_words + g * WORDS, mask=there, other=0)
        keys = decoded(words, table_ptr, like_ptr, PLANES, FLIP, OFFSET, ASM)
        part = tl.zeros((BLOCK_M, place.shape[0]), tl.float32)
        for j in tl.static_range(PLANES):
            k = keys[j]
            if CHANNELS:
                channel = PLANES * i + j
                by = (blocks + at // TOKENS) * DIM + channel
                k = scaled(k, by, channel < DIM, scale_ptr, zero_ptr, OFFSET, FMA)
            part = tl.dot(planes[g * PLANES + j], k, part)
        if CHANNELS:
            total += part
        else:
            by = (blocks + place // TOKENS) * GROUPS + g
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + by, mask=inside, other=0).to(tl.float32)
                part -= moved[g][:, None] * (zero - OFFSET)[None, :]
            elif OFFSET:
                part += moved[g][:, None] * OFFSET
            total += part * tl.load(scale_ptr + by, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def seen_logits(
    logits,
    place,
    own,
    low,
    end,
    window,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Logits in powers of two; -inf where a row does not see a token."""
    logits *= scale
    if SOFTCAP:
        # 1 - 2 / (1 + e**2x) is the hyperbolic tangent; `scale` has 2 / softcap and `softcap` log2(e) in it
        logits = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(logits)))
    seen = ((place >= low) & (place < end))[None, :]
    if CAUSAL:
        behind = own[:, None] - place[None, :]
        seen = seen & (behind >= 0) & (behind < window)
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def weights_of(logits, greatest, total):
    """The weights of tokens, what is kept of earlier sums, the greatest logit now, and the sum of weights."""
    highest = tl.maximum(greatest, tl.max(logits, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logits - base[:, None])
    kept = tl.exp2(greatest - base)
    return weights, kept, highest, total * kept + tl.sum(weights, 1)


@triton.jit
def add_values(
    weights,
    kept,
    sums,
    units,
    zeros,
    place,
    end,
    stored,
    value_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    like_ptr,
    memory,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PLANES: tl.constexpr,
    PIECES: tl.constexpr,
    FLIP: tl.constexpr,
    OFFSET: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the values of BLOCK_N tokens, as codes, to the sums of each plane.

    The sums of a group are in `units`, the greatest scale so far: then the products of weights and
    scales are at most 1, and float16 has room for them. `zeros` are sums of such products and zero points.
    """
    WORDS: tl.constexpr = GROUP // PLANES
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    inside = place < end
    i = tl.arange(0, WORDS)
    element = like_ptr.dtype.element_ty
    at_words = value_ptr + (stored * memory + place)[:, None] * (DIM // PLANES) + i[None, :]
    blocks = stored * tl.cdiv(memory, TOKENS)
    new_sums = ()
    new_units = ()
    new_zeros = ()
    for g in tl.static_range(GROUPS):
        by = (blocks + place // TOKENS) * GROUPS + g
        scale = tl.load(scale_ptr + by, mask=inside, other=0.0).to(tl.float32)
        unit = units[g]
        left = kept
        if element == tl.float16:
            unit = tl.maximum(unit, tl.max(tl.abs(scale), 0))
            inverse = 1.0 / tl.where(unit == 0.0, 1.0, unit)
            scale *= inverse
            left = kept * (units[g] * inverse)
        scaled = (weights * scale[None, :]).to(element)
        there = inside[:, None] & (g * WORDS + i < DIM // PLANES)[None, :]
        words = tl.load(at_words + g * WORDS, mask=there, other=0)
        values = decoded(words, table_ptr, like_ptr, PLANES, FLIP, OFFSET, ASM)
        for piece in tl.static_range(PIECES):
            some = concat_planes(values, piece * (PLANES // PIECES), PLANES // PIECES)
            new_sums += (tl.dot(scaled, some, sums[g * PIECES + piece] * left[:, None]),)
        moved = zeros[g] * left
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + by, mask=inside, other=0).to(tl.float32) - OFFSET
            moved += tl.sum(scaled.to(tl.float32) * zero[None, :], 1)
        elif OFFSET:
            moved -= tl.sum(scaled.to(tl.float32), 1) * OFFSET
        new_units += (unit,)
        new_zeros += (moved,)
    for rest in tl.static_range(GROUPS * PIECES, len(sums)):
        new_sums += (sums[rest],)
    return new_sums, new_units, new_zeros
