"""Scales of 8 bits; see `ao_kernels.triton.weight_only.scales` for how they are stored, and their PTX."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def grid_place(
    block, n_tile, plane, offs_n, BLOCK_N: tl.constexpr, PLANES: tl.constexpr, PLANES_PER_GROUP: tl.constexpr,
    GROUPS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Where one plane's scales, or zero points, of `offs_n` of a tile are.

    `block` is the number of the tile, `n_tile` that of its row of tiles. GROUPS_PER_TILE: those of a row
    and a tile are neighbours.
    """
    if PLANES_PER_GROUP == 0:
        at = n_tile * BLOCK_N + offs_n
    elif GROUPS_PER_TILE:
        at = (block * BLOCK_N + offs_n) * (PLANES // PLANES_PER_GROUP) + plane // PLANES_PER_GROUP
    else:
        at = (block * (PLANES // PLANES_PER_GROUP) + plane // PLANES_PER_GROUP) * BLOCK_N + offs_n
    return at


@triton.jit
def scales(at, global_scale_ptr, SCALE: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr):
    """Scales in float32 without assembly, those of 8 bits too, times the one for all of them."""
    scale = tl.load(at)
    scale = scale.to(tl.float32) if SCALE is None else _decoded(scale.to(tl.int32), SCALE)
    if HAS_GLOBAL_SCALE:
        scale *= tl.load(global_scale_ptr)
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
        PLANES_PER_DOT: tl.constexpr = 4 if COUNT % 4 == 0 else 2 if COUNT % 2 == 0 else 1
        CONSTRAINTS: tl.constexpr = "=r," * PLANES_PER_DOT + "l"
        for i in tl.static_range(0, COUNT, PLANES_PER_DOT):
            found += tl.inline_asm_elementwise(
                LOAD, CONSTRAINTS, [(at + i).to(tl.int64)], dtype=(tl.float32,) * PLANES_PER_DOT,
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
