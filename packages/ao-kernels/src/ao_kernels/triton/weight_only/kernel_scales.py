"""Scales of 8 bits, as `ao_kernels.triton.weight_only.scales` says that they lie; see there for the assembly."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def grid_place(
    block, col_tile, plane, col, COLS: tl.constexpr, PLANES: tl.constexpr, CHAIN: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Where one plane's scales, or zero points, of rows `col` of a tile are.

    `block` counts all tiles, `col_tile` rows of them. BESIDE, those of a row and a tile are neighbours.
    """
    if CHAIN == 0:
        at = col_tile * COLS + col
    elif BESIDE:
        at = (block * COLS + col) * (PLANES // CHAIN) + plane // CHAIN
    else:
        at = (block * (PLANES // CHAIN) + plane // CHAIN) * COLS + col
    return at


@triton.jit
def scales(at, outer_ptr, SCALE: tl.constexpr, HAS_OUTER: tl.constexpr):
    """Scales in float32 without assembly, those of 8 bits too, times the one for all of them."""
    scale = tl.load(at)
    scale = scale.to(tl.float32) if SCALE is None else _decoded(scale.to(tl.int32), SCALE)
    if HAS_OUTER:
        scale *= tl.load(outer_ptr)
    return scale


@triton.jit
def neighbours(at, COUNT: tl.constexpr, SCALE: tl.constexpr, LOAD: tl.constexpr):
    """So many tensors: from each address on, neighbouring scales of 8 bits in float32.

    Each thread loads those of its own rows.
    """
    found = ()
    if LOAD is None:
        for i in tl.static_range(COUNT):
            found += (_decoded(tl.load(at + i).to(tl.int32), SCALE),)
    else:
        AT_ONCE: tl.constexpr = 4 if COUNT % 4 == 0 else 2 if COUNT % 2 == 0 else 1
        CONSTRAINTS: tl.constexpr = "=r," * AT_ONCE + "l"
        for i in tl.static_range(0, COUNT, AT_ONCE):
            found += tl.inline_asm_elementwise(
                LOAD, CONSTRAINTS, [(at + i).to(tl.int64)], dtype=(tl.float32,) * AT_ONCE,
                is_pure=True, pack=1,
            )  # fmt: skip
    return found


@triton.jit
def _decoded(code, SCALE: tl.constexpr):
    if SCALE == "e8m0":
        bits = tl.maximum(code << 23, 0x00400000)
        value = tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        magnitude = code & 127
        # moved into place, it is 2**-120 of the number
        value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(magnitude == 127, float("nan"), value)
        value = tl.where(code > 127, -value, value)
    return value
