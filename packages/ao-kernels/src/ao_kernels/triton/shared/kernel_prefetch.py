"""The prologue of a kernel with programmatic dependent launch (PDL): L2 prefetch of weights."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch_weights(
    w_ptr,
    n_tile,
    split,
    k_tiles,
    tiles_per_split,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
):
    """Prefetch a CTA's first PREFETCH_TILES tiles into L2, then wait for the kernel in front.

    Activations are there after the wait. The dependent kernel may start at once. A tile is WORDS times SIZE
    contiguous elements; PREFETCH is that of `ao_kernels.triton.shared.ptx`, for 128 bytes.
    """
    gdc_launch_dependents()
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    block = n_tile.to(tl.int64) * k_tiles + split * tiles_per_split
    lines = tl.arange(0, SIZE // LINE) * LINE
    for ahead in tl.static_range(PREFETCH_TILES):
        tile = tl.minimum(block + ahead, tl.num_programs(0).to(tl.int64) * k_tiles - 1)
        for word in tl.static_range(WORDS):
            line_at = w_ptr + (tile * WORDS + word) * SIZE + lines
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l", [line_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
            )
    gdc_wait()
