"""Rounding to integers and to bfloat16."""

from __future__ import annotations

import math

import pytest
import torch

from ao_core.errors import ConfigError
from ao_core.numerics import round_half_even, round_to_16_bits, stochastic_round_to


def test_round_half_even():
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4999, 3.5])
    assert round_half_even(x).tolist() == [-2.0, -2.0, -0.0, 0.0, 2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_to_16_bits_is_a_cast_there_and_back(dtype: torch.dtype):
    """All values of the short format, the midpoints between them, and their neighbours."""
    short = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    short = short[short.isfinite()].unique()
    middle = (short[1:].double() + short[:-1].double()).div(2).float()
    x = torch.cat([short, middle])
    x = torch.cat([x, *(x.nextafter(torch.tensor(s)) for s in (math.inf, -math.inf))])
    x = x.clamp(short[0], short[-1])
    got = round_to_16_bits(x, dtype)
    assert torch.equal(got, x.to(dtype).float())
    nan = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
    assert round_to_16_bits(nan.view(torch.float32), dtype).isnan().all()


@pytest.mark.parametrize("fraction", [0.0, 1 / 65536, 0.1, 0.5, 0.75])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_is_unbiased(fraction: float, sign: float):
    low, step = 1.0, 2.0**-7  # neighbours of 1.0 in bfloat16
    n = 200_000
    x = torch.full((n,), sign * (low + fraction * step))
    rounded = stochastic_round_to(x, generator=torch.Generator().manual_seed(0)).float()
    ups = (rounded.abs() == low + step).sum().item()
    assert ((rounded.abs() == low) | (rounded.abs() == low + step)).all()
    assert (rounded.sign() == sign).all()
    deviation = math.sqrt(fraction * (1 - fraction) * n)
    assert abs(ups - fraction * n) <= 5 * deviation


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = stochastic_round_to(patterns.float())
    nan = patterns.isnan()
    assert torch.equal(rounded.isnan(), nan)
    assert torch.equal(rounded[~nan].view(torch.int16), patterns[~nan].view(torch.int16))


def test_stochastic_rounding_follows_its_generator():
    x = torch.randn(1000)
    first, again, other = (
        stochastic_round_to(x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_stochastic_rounding_names_what_it_supports():
    with pytest.raises(ConfigError, match=r"dtype=torch\.float16"):
        stochastic_round_to(torch.ones(1), torch.float16)
    with pytest.raises(ConfigError, match=r"torch\.float64"):
        stochastic_round_to(torch.ones(1, dtype=torch.float64))
