"""Packing functions, each with its inverse, against codes placed bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ao_core.ext import CheckpointError
from ao_quant.interchange import words

sizes = st.integers(1, 40)
widths = st.integers(1, 8)


def codes_of(rows: int, n: int, bits: int) -> Tensor:
    made = torch.Generator().manual_seed(rows * 1000 + n * 10 + bits)
    return torch.randint(0, 1 << bits, (rows, n), dtype=torch.uint8, generator=made)


@given(
    rows=st.integers(1, 4),
    n=sizes,
    bits=widths,
    dtype=st.sampled_from([torch.int32, torch.uint32, torch.uint8]),
)
def test_a_stream_in_words_has_each_code_at_its_bits(
    rows: int, n: int, bits: int, dtype: torch.dtype
) -> None:
    codes = codes_of(rows, n, bits)
    packed = words.pack_words(codes, bits, dtype)
    assert packed.dtype == dtype
    assert packed.shape == (
        rows,
        words.words(n, bits, 8 * dtype.itemsize),
    )
    assert torch.equal(words.unpack_words(packed, bits, n), codes)
    row = packed[-1].reshape(-1).view(torch.uint8).tolist()
    number = int.from_bytes(bytes(row), "little")
    assert [(number >> (bits * i)) & ((1 << bits) - 1) for i in range(n)] == codes[-1].tolist()


@given(rows=st.integers(1, 4), n=sizes, bits=widths)
def test_padded_words_have_whole_codes(rows: int, n: int, bits: int) -> None:
    codes, count = codes_of(rows, n, bits), 32 // bits
    packed = words.pack_padded(codes, bits)
    assert packed.shape == (rows, -(-n // count))
    assert torch.equal(words.unpack_padded(packed, bits, n), codes)
    for i, code in enumerate(codes[0].tolist()):
        assert int(packed[0, i // count]) >> (bits * (i % count)) & ((1 << bits) - 1) == code


@given(rows=st.integers(1, 41), n=st.integers(1, 5), bits=st.sampled_from([1, 2, 3, 4, 8]))
def test_fractions_have_the_first_rows_in_the_highest_bits(rows: int, n: int, bits: int) -> None:
    codes = codes_of(rows, n, bits)
    packed = words.pack_fractions(codes, bits)
    assert torch.equal(words.unpack_fractions(packed, bits, rows), codes)
    count = 10 if bits == 3 else 8 // bits
    assert torch.equal((packed[0] >> (bits * (count - 1))).to(torch.uint8), codes[0])


@given(groups=st.integers(1, 5))
def test_a_nibble_of_awq_is_where_its_order_says(groups: int) -> None:
    codes = codes_of(2, 8 * groups, 4)
    packed = words.pack_words(words.reorder(codes, words.AWQ_ORDER), 4)
    for place, column in enumerate(words.AWQ_ORDER):
        assert torch.equal(((packed[:, 0] >> (4 * place)) & 15).to(torch.uint8), codes[:, column])
    back = words.reorder(words.unpack_words(packed, 4, 8 * groups), words.AWQ_ORDER, inverse=True)
    assert torch.equal(back, codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_flipping_the_sign_is_twos_complement(bits: int) -> None:
    signed = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1))
    unsigned = (signed + (1 << (bits - 1))).to(torch.uint8)
    stored = (signed & ((1 << bits) - 1)).to(torch.uint8)
    assert torch.equal(words.flip_sign(unsigned, bits), stored)
    assert torch.equal(words.flip_sign(stored, bits), unsigned)


def test_too_few_words_are_an_error() -> None:
    for unpack in (words.unpack_words, words.unpack_padded):
        with pytest.raises(CheckpointError, match="words|bytes"):
            unpack(torch.zeros(1, 1, dtype=torch.int32), 4, 9)
    with pytest.raises(CheckpointError, match="rows"):
        words.unpack_fractions(torch.zeros(1, 1, dtype=torch.uint8), 4, 3)
