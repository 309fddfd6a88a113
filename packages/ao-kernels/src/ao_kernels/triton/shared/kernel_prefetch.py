"""How a kernel begins that is launched before the one in front of it has ended: with what is known."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def bring_weights(
    w_ptr,
    col_tile,
    split,
    tiles,
    tiles_a_split,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Bring a block's first AHEAD tiles nearer, and wait for the kernel before: then there are activations.

    The kernel after may start at once. A tile is WORDS times SIZE elements in one piece; PREFETCH is that of
    `ao_kernels.triton.shared.ptx`, for 128 bytes.
    """
    gdc_launch_dependents()
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    block = col_tile.to(tl.int64) * tiles + split * tiles_a_split
    lines = tl.arange(0, SIZE // LINE) * LINE
    for soon in tl.static_range(AHEAD):
        near = tl.minimum(block + soon, tl.num_programs(0).to(tl.int64) * tiles - 1)
        for word in tl.static_range(WORDS):
            line_at = w_ptr + (near * WORDS + word) * SIZE + lines
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l", [line_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
            )
    gdc_wait()
