"""Packed codes are the little-endian bit stream that numpy.packbits makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.errors import ConfigError
from ao_core.numerics import pack_bits, pack_unit, packed_size, slabs, unpack_bits

BITS = range(1, 9)


def numpy_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each code's bits, lowest first, packed along the last dimension and padded to whole units."""
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    packed = np.packbits(stream, axis=-1, bitorder="little")
    missing = packed_size(codes.shape[-1], bits) - packed.shape[-1]
    return np.pad(packed, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])


@pytest.mark.parametrize(
    ("bits", "unit"),
    [
        (1, (8, 1)),
        (2, (4, 1)),
        (3, (8, 3)),
        (4, (2, 1)),
        (5, (8, 5)),
        (6, (4, 3)),
        (7, (8, 7)),
        (8, (1, 1)),
    ],
)
def test_pack_unit(bits: int, unit: tuple[int, int]):
    assert pack_unit(bits) == unit


@pytest.mark.parametrize("bits", BITS)
def test_packed_size_is_the_least_number_of_whole_units(bits: int):
    values, size = pack_unit(bits)
    for n in range(40):
        stored = packed_size(n, bits)
        assert stored % size == 0
        assert stored * 8 >= n * bits
        assert (stored - size) // size * values < n or n == 0


@given(st.data())
def test_pack_matches_numpy_and_unpack_inverts_it(data: st.DataObject):
    bits = data.draw(st.integers(1, 8), label="bits")
    shape = data.draw(st.lists(st.integers(0, 3), max_size=2), label="lead")
    shape = (*shape, data.draw(st.integers(0, 50), label="n"))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    codes = np.random.default_rng(seed).integers(0, 1 << bits, shape, dtype=np.uint8)
    packed = pack_bits(torch.from_numpy(codes), bits)
    assert packed.dtype == torch.uint8
    np.testing.assert_array_equal(packed.numpy(), numpy_stream(codes, bits))
    unpacked = unpack_bits(packed, bits, shape[-1])
    assert unpacked.is_contiguous()
    np.testing.assert_array_equal(unpacked.numpy(), codes)


def test_low_nibble_comes_first():
    assert pack_bits(torch.tensor([0x1, 0x2, 0x3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]


@pytest.mark.parametrize("bits", BITS)
def test_pack_of_strided_codes(bits: int):
    codes = torch.randint(0, 1 << bits, (24, 10), dtype=torch.uint8)
    assert torch.equal(pack_bits(codes.t(), bits), pack_bits(codes.t().contiguous(), bits))


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range(bits: int):
    with pytest.raises(ConfigError, match=f"bits={bits}"):
        pack_unit(bits)


def test_unpack_refuses_a_wrong_number_of_bytes():
    with pytest.raises(ConfigError, match="10 codes of 3 bits take 6 bytes, .* has 5"):
        unpack_bits(torch.zeros(2, 5, dtype=torch.uint8), 3, 10)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(90, 501), (3, 3001), (2, 7, 64)])
def test_large_codes_are_unpacked_in_slabs(bits: int, shape: tuple[int, ...], monkeypatch) -> None:
    """Rows, or pieces of a row, at a time: the same codes."""
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    monkeypatch.setattr(slabs, "SLAB", 100)
    assert torch.equal(unpack_bits(packed, bits, shape[-1]), codes)
    assert torch.equal(pack_bits(codes, bits), packed)
