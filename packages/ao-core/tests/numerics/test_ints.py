"""Integer codes against Python integers."""

from __future__ import annotations

import math

import pytest
import torch

from ao_core.numerics import decode_int, encode_int

RANGES = [
    *((bits, -(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in range(1, 9)),
    *((bits, 0, (1 << bits) - 1) for bits in range(1, 9)),
    (2, -1, 1),
    (8, -127, 127),
]
every_range = pytest.mark.parametrize(("bits", "low", "high"), RANGES)


@every_range
def test_every_code_is_twos_complement_within_the_bounds(bits: int, low: int, high: int):
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    expected = [c - (1 << bits) if low < 0 and c >> (bits - 1) else c for c in range(1 << bits)]
    got = decode_int(codes, bits, low, high)
    assert got.dtype == torch.float32
    assert got.tolist() == [min(max(v, low), high) for v in expected]
    inside = torch.tensor([low <= v <= high for v in expected])
    assert torch.equal(encode_int(got, bits, low, high)[inside], codes[inside])


@every_range
def test_halves_and_their_neighbours_round_to_nearest_even(bits: int, low: int, high: int):
    halves = torch.arange(2 * low - 5, 2 * high + 6) / 2
    x = torch.cat([halves, *(halves.nextafter(torch.tensor(s)) for s in (math.inf, -math.inf))])
    codes = encode_int(x, bits, low, high)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 1 << bits
    expected = [min(max(round(v), low), high) for v in x.tolist()]  # Python rounds halves to even
    assert decode_int(codes, bits, low, high).tolist() == expected


@every_range
def test_special_values(bits: int, low: int, high: int):
    x = torch.tensor([math.inf, -math.inf, 1e38, -1e38, math.nan, -0.0])
    values = decode_int(encode_int(x, bits, low, high), bits, low, high).tolist()
    assert values == [high, low, high, low, 0, 0]


def test_inputs_are_left_alone():
    x = torch.randn(5, 4).t() * 10
    before = x.clone()
    codes = encode_int(x, 4, -8, 7)
    kept = codes.clone()
    assert decode_int(codes, 4, -8, 7).shape == codes.shape == x.shape
    assert torch.equal(x, before)
    assert torch.equal(codes, kept)
