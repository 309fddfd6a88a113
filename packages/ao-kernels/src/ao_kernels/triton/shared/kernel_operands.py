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
def _load(at, LOAD: tl.constexpr, CONSTRAINTS: tl.constexpr):
    return tl.inline_asm_elementwise(
        LOAD, CONSTRAINTS, [at.to(tl.int64)], dtype=at.dtype.element_ty, is_pure=True, pack=1
    )
