"""Operands of matmuls with weights: planes concatenated along K, and scales."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def concat_planes(planes, first: tl.constexpr, COUNT: tl.constexpr):
    """Planes concatenated along K."""
    if COUNT == 1:
        both = planes[first]
    else:
        HALF: tl.constexpr = COUNT // 2
        both = tl.join(
            concat_planes(planes, first, HALF), concat_planes(planes, first + HALF, HALF)
        )
        both = tl.permute(both, (0, 2, 1))
        both = tl.reshape(both, (both.shape[0], both.shape[1] * both.shape[2]))
    return both


@triton.jit
def ones_like(K: tl.constexpr, N: tl.constexpr, like_ptr, ONES: tl.constexpr):
    """N × K ones, the left operand of products that are sums; ONES is PTX for two of 16 bits, four of 8.

    From PTX that the compiler must not repeat, they lie in shared memory. As constants they would be put in
    registers anew before each product.
    """
    element = like_ptr.dtype.element_ty
    if ONES is None:
        one = tl.full((N, K), 1.0, tl.float32)
        if element.is_fp8():  # noqa: SIM108  # 56 are the bits of 1 in e4m3
            one = (one * 56.0).to(tl.uint8).to(element, bitcast=True)
        else:
            one = one.to(element)
    else:
        k = tl.arange(0, N)[:, None] * K + tl.arange(0, K)[None, :]
        one = tl.inline_asm_elementwise(
            ONES, "=r,r,r" if element.primitive_bitwidth == 16 else "=r,r,r,r,r", [k], dtype=element,
            is_pure=False, pack=32 // element.primitive_bitwidth,
        )  # fmt: skip
    return one


@triton.jit
def load_scales(at, LOAD: tl.constexpr):
    """The scales of BLOCK_N rows in float32, each thread loading those of its own rows.

    A plain load would be done once per row, and then go to all threads through shared memory.
    """
    if LOAD is None:
        scale = tl.load(at)
    elif at.dtype.element_ty == tl.float32:
        scale = _load(at, LOAD, "=r,l")
    else:
        scale = _load(at, LOAD, "=h,l")
    return scale.to(tl.float32)


@triton.jit
def load_zeros(at, LOAD: tl.constexpr):
    """The zero points of BLOCK_N rows in float32, loaded as scales are."""
    if at.dtype.element_ty != tl.uint8:
        zero_point = load_scales(at, LOAD)
    else:
        if LOAD is None:
            code = tl.load(at).to(tl.int32)
        else:
            code = tl.inline_asm_elementwise(
                LOAD, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
        # a small integer in the last bits of 2**23 is that much more: no conversion is needed
        zero_point = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return zero_point


@triton.jit
def _load(at, LOAD: tl.constexpr, CONSTRAINTS: tl.constexpr):
    return tl.inline_asm_elementwise(
        LOAD, CONSTRAINTS, [at.to(tl.int64)], dtype=at.dtype.element_ty, is_pure=True, pack=1
    )
