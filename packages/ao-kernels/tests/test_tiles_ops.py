"""The ops on tiles, called by themselves: codes from and to rows, values, rows by their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ao_core.ext.numerics import pack_bits
from ao_kernels.cpu.library import load

load()
ops = torch.ops.ao_kernels
#: n, k, group: whole blocks and tiles, parts of them, groups that begin within a byte, single ones
SIZES = (
    (16, 64, 64),
    (16, 32, 32),
    (5, 37, 37),
    (33, 100, 32),
    (16, 96, 24),
    (20, 50, 7),
    (48, 600, 128),
    (17, 530, 130),
    (16, 777, 777),
    (3, 1, 1),
)
SCALES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)


def seeded(*what: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(what) % (1 << 31))


def tile_codes(tile: Tensor, bits: int) -> Tensor:
    """The 16 x 16 codes of a tile of 32 * bits bytes, plane by plane as the layout defines them."""
    tile = tile.int()
    codes = torch.zeros(16, 16, dtype=torch.int32)
    if bits == 8:
        return tile.view(4, 16, 4).transpose(0, 1).reshape(16, 16)
    shift = 0
    if bits & 4:
        plane, tile = tile[:128].view(2, 16, 4), tile[128:]
        for v in range(2):
            codes[:, 8 * v : 8 * v + 4] = plane[v] & 15
            codes[:, 8 * v + 4 : 8 * v + 8] = plane[v] >> 4
        shift = 4
    if bits & 2:
        plane, tile = tile[:64].view(16, 4), tile[64:]
        for i in range(4):
            codes[:, 4 * i : 4 * i + 4] |= (plane >> 2 * i & 3) << shift
        shift += 2
    if bits & 1:
        plane = tile.view(16, 2)
        for j in range(8):
            element = 4 * j if j < 4 else 4 * (j - 4) + 1
            for h in range(2):
                codes[:, element + 2 * h] |= (plane[:, h] >> j & 1) << shift
    return codes


def columns(n_groups: int, k: int, group: int) -> list[int]:
    """For each column of the tiles in order the column of the matrix, or -1 for padding."""
    found = []
    for g in range(n_groups):
        end = min(k, (g + 1) * group)
        size = -(-(end - g * group) // 16) * 16
        found += [c if c < end else -1 for c in range(g * group, g * group + size)]
    return found


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_from_rows_and_back(bits: int, size: tuple[int, int, int]) -> None:
    n, k, group = size
    flip = bits * 37 % (1 << bits)
    codes = torch.randint(1 << bits, (2, n, k), generator=seeded(bits, *size)).to(torch.uint8)
    packed = pack_bits(codes, bits)
    qdata = ops.pack_tiles(packed, n, k, bits, group, flip)
    assert torch.equal(ops.unpack_tiles(qdata, n, k, bits, group, flip), packed)
    blocks, places = -(-n // 16), columns(-(-k // group), k, group)
    assert qdata.shape == (2, blocks, len(places) // 16, 32 * bits)
    wanted = torch.zeros(2, blocks * 16, len(places), dtype=torch.int32)
    wanted[:, :n, [i for i, c in enumerate(places) if c >= 0]] = (codes ^ flip).int()
    for e in range(2):
        for b in range(blocks):
            found = torch.cat([tile_codes(tile, bits) for tile in qdata[e, b]], 1)
            assert torch.equal(found, wanted[e, 16 * b : 16 * b + 16])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_and_rows(bits: int, size: tuple[int, int, int]) -> None:
    """(value - zero) * (scale * outer), or value * (scale * outer) - offset * outer, each rounded to
    float32, and the result to its dtype."""
    n, k, group = size
    seed = seeded(bits, *size)
    codes = torch.randint(1 << bits, (2, n, k), generator=seed).to(torch.uint8)
    qdata = ops.pack_tiles(pack_bits(codes, bits), n, k, bits, group, 0)
    table = torch.randn(1 << bits, generator=seed)
    groups, span = -(-k // group), bits % 3 + 2
    span = min(span, groups)
    parts = (2, -(-n // 16), groups, 16)
    outers = (2, -(-n // 16), -(-groups // span), 16)

    def by_element(part: Tensor) -> Tensor:
        rows = part.transpose(2, 3).flatten(1, 2)[:, :n]
        return rows.repeat_interleave(group, 2)[:, :, :k]

    def by_group(outer: Tensor | None) -> Tensor:
        if outer is None:
            return torch.ones(1)
        return outer.float().repeat_interleave(span, 2)[:, :, :groups]

    zeros = (
        None,
        torch.randn(parts, generator=seed).bfloat16(),
        torch.randint(1 << bits, parts, generator=seed).to(torch.uint8),
    )
    for scale_dtype in (*SCALES, torch.uint8, torch.int8):
        scale = (torch.rand(parts, generator=seed) * 100).to(scale_dtype)
        nested = scale_dtype.itemsize == 1 and scale_dtype != SCALES[4]
        outer = torch.rand(outers, generator=seed).to(SCALES[bits % 3]) if nested else None
        factor = scale.float() * by_group(outer)
        for zero_point in zeros:
            values = table[codes.long()]
            if (
                zero_point is not None and zero_point.dtype == torch.uint8
            ):  # codes, stored ones less the flip
                signed = 1 << (bits - 1) if table[0] < 0 else 0
                values = values - by_element(table[zero_point.long() ^ signed])
            elif zero_point is not None:
                values = values - by_element(zero_point.float())
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                expected = (values * by_element(factor)).to(dtype)
                where = (None, None, table, n, k, bits, group, span, dtype)
                found = ops.dequantize_tiles(qdata, scale, outer, zero_point, *where)
                assert torch.equal(found, expected)
                ids = torch.randint(n, (3, 2), generator=seed)
                first = [None if p is None else p[:1] for p in (qdata, scale, outer, zero_point)]
                assert torch.equal(ops.embedding(ids, *first, *where), expected[0][ids])
                assert torch.equal(ops.embedding(ids.int(), *first, *where), expected[0][ids])
        # offset zero points, stored as scales are
        shift = by_element(scale.flip(1).float() * by_group(outer))
        expected = table[codes.long()] * by_element(factor) - shift
        given = (qdata, scale, outer, None, scale.flip(1), outer, table, n, k, bits, group, span)
        assert torch.equal(ops.dequantize_tiles(*given, torch.float32), expected)


def test_empty() -> None:
    packed = torch.zeros(0, 20, 16, dtype=torch.uint8)
    qdata = ops.pack_tiles(packed, 20, 32, 4, 32, 0)
    assert qdata.shape == (0, 2, 2, 128)
    assert ops.unpack_tiles(qdata, 20, 32, 4, 32, 0).shape == (0, 20, 16)
    scale, table = torch.zeros(0, 2, 1, 16), torch.zeros(16)
    none = (None, None, None, None)
    values = ops.dequantize_tiles(qdata, scale, *none, table, 20, 32, 4, 32, 1, torch.float16)
    assert (values.shape, values.dtype) == ((0, 20, 32), torch.float16)
    one = torch.zeros(2, 2, 128, dtype=torch.uint8)
    ids = torch.zeros(0, 3, dtype=torch.int64)
    rows = ops.embedding(
        ids, one, torch.zeros(2, 1, 16), *none, table, 20, 32, 4, 32, 1, torch.float32
    )
    assert rows.shape == (0, 3, 32)


@pytest.mark.parametrize("index", [20, -1, 1 << 40])
def test_indices_out_of_range(index: int) -> None:
    one, scale = torch.zeros(2, 2, 128, dtype=torch.uint8), torch.zeros(2, 1, 16)
    where = (None, None, torch.zeros(16), 20, 32, 4, 32, 1, torch.float32)
    with pytest.raises(IndexError, match=rf"ids: index {index} is out of range; there are 20 rows"):
        ops.embedding(torch.tensor([0, index]), one, scale, None, None, *where)
