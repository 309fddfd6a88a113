"""Programmatic dependent launch (PDL): how a kernel begins, and what it prefetches into L2 meanwhile."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start(PDL: tl.constexpr):
    """With PDL, let the dependent kernel be launched, and wait for the one in front; nothing was read yet.

    Whoever is launched early waits, so what a kernel may read is there when those before it have waited too.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(at, SIZE: tl.constexpr, PREFETCH: tl.constexpr):
    """SIZE contiguous elements; PREFETCH is that of `ao_kernels.triton.shared.ptx`, for 128 bytes."""
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (SIZE + LINE - 1) // LINE
    lines_at = at + tl.arange(0, triton.next_power_of_2(LINES)) % LINES * LINE
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l", [lines_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_tiles(
    ptr, tile_row, first, k_tiles, COUNT: tl.constexpr, SIZE: tl.constexpr, PREFETCH: tl.constexpr
):
    """The first COUNT tiles of SIZE elements from tile `first` on, in a row of tiles."""
    for ahead in tl.static_range(COUNT):
        tile = tile_row.to(tl.int64) * k_tiles + tl.minimum(first + ahead, k_tiles - 1)
        prefetch(ptr + tile * SIZE, SIZE, PREFETCH)
