"""Which expert an M tile belongs to, by offsets that are read on the device: the host does not wait."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def find(offs_ptr, m_tile, M, experts, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Of a tile: its first row, the row after those that are its expert's, and the expert.

    The rows of expert e end at offs[e], and GROUPS is a power of two above the number of experts. The rows
    after the last expert's are those of one more. Each expert has tiles of its own. Whatever the offsets are,
    no row is outside of the M that there are.
    """
    group = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + group, mask=group < experts, other=M)
    starts = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group <= experts), other=M)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    starts = tl.where(group == 0, 0, tl.minimum(tl.maximum(starts, 0), M))
    tiles = tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= m_tile).to(tl.int32), 0)
    mine = group == expert
    row = tl.sum(tl.where(mine, starts + (m_tile - after + tiles) * BLOCK_M, 0), 0)
    return row, tl.sum(tl.where(mine, ends, 0), 0), expert
