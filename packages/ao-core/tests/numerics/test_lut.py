"""LUTs against brute force, and NF4 against the normal quantiles it is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from ao_core.numerics import NF4_VALUES, decode_lut, encode_lut


def random_values(n: int) -> tuple[float, ...]:
    values = torch.randn(4 * n, generator=torch.Generator().manual_seed(n)).unique()
    return tuple(values[:n].tolist())


BOOKS = {"nf4": NF4_VALUES} | {f"random{n}": random_values(n) for n in (2, 3, 17, 18, 100, 256)}
every_book = pytest.mark.parametrize("values", BOOKS.values(), ids=BOOKS)


def nearest(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Brute force in float64; argmin takes the first, hence the lower, of two equal distances."""
    x = x.double().clamp(values[0], values[-1])  # float64 would round far distances to ties
    distance = (x[:, None] - torch.tensor(values, dtype=torch.float64)).abs()
    return torch.from_numpy(distance.numpy().argmin(axis=1)).to(torch.uint8)


def test_nf4_from_normal_quantiles():
    """QLoRA: 8 positive and 7 negative quantiles, evenly spaced from 0.5 to a tail, and zero."""
    tail = ((1 - 1 / 32) + (1 - 1 / 30)) / 2
    positive = norm.ppf(np.linspace(0.5, tail, 9)[1:])
    negative = -norm.ppf(np.linspace(0.5, tail, 8)[1:])
    derived = np.sort(np.concatenate([negative, [0.0], positive])) / positive[-1]
    np.testing.assert_allclose(NF4_VALUES, derived, rtol=0, atol=2e-7)
    assert NF4_VALUES[0] == -1.0
    assert NF4_VALUES[7] == 0.0
    assert NF4_VALUES[15] == 1.0


@every_book
def test_encode_inverts_decode(values: tuple[float, ...]):
    codes = torch.arange(len(values), dtype=torch.uint8)
    decoded = decode_lut(codes, values)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == list(values)
    assert torch.equal(encode_lut(decoded, values), codes)


@every_book
def test_midpoints_and_their_neighbours(values: tuple[float, ...]):
    points = torch.tensor(values, dtype=torch.float64)
    middle = ((points[1:] + points[:-1]) / 2).float()
    x = torch.cat([middle, *(middle.nextafter(torch.tensor(s)) for s in (math.inf, -math.inf))])
    codes = encode_lut(x, values)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, nearest(x, values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_inputs(dtype: torch.dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    assert torch.equal(encode_lut(x, NF4_VALUES), nearest(x, NF4_VALUES))


@given(
    st.sampled_from(sorted(BOOKS)),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
)
def test_any_float32_goes_to_the_nearest(name: str, values: list[float]):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(encode_lut(x, BOOKS[name]), nearest(x, BOOKS[name]))


@every_book
def test_special_values(values: tuple[float, ...]):
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    high, low, nan, zero_point = encode_lut(x, values).tolist()
    assert (low, high) == (0, len(values) - 1)
    assert nan == zero_point


def test_a_tie_goes_to_the_lower_value():
    assert encode_lut(torch.tensor([0.5, 1.5]), (0.0, 1.0, 2.0)).tolist() == [0, 1]
    many = tuple(float(v) for v in range(64))
    assert encode_lut(torch.tensor([0.5, 62.5]), many).tolist() == [0, 62]


def test_unused_codes_read_as_the_last_value():
    codes = torch.arange(4, dtype=torch.uint8)
    assert decode_lut(codes, (-1.0, 0.0, 2.0)).tolist() == [-1.0, 0.0, 2.0, 2.0]


def test_shapes_are_kept_and_the_default_dtype_does_not_matter():
    x = torch.randn(3, 4).t()
    codes = encode_lut(x, NF4_VALUES)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(encode_lut(x, NF4_VALUES), codes)
        assert decode_lut(codes, NF4_VALUES).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert decode_lut(codes, NF4_VALUES).shape == codes.shape == (4, 3)
