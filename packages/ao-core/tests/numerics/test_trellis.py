"""Trellis codes against brute force, Shannon's limit and the best quantizer of single numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from ao_core.numerics import TRELLIS_BITS, decode_trellis, encode_trellis, trellis_values
from ao_core.numerics.trellis import _by_digits, _path

#: squared error of the best 2**bits values for a normal distribution (Max 1960, table I)
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_values_are_quantiles_of_a_normal_distribution():
    values = torch.tensor(trellis_values())
    assert values[0] == 0
    assert torch.equal(values[128:].flip(0), -values[:128].roll(0) + 0 * values[:128])
    assert int(values.abs().max()) <= 127
    index = (torch.arange(256).to(torch.int8).double() + 0.5) / 256 + 0.5
    expected = 43 * torch.special.ndtri(index)
    assert float((values - expected).abs().max()) <= 0.5 + 1e-9


@pytest.mark.parametrize("seam", [None, 2])
@pytest.mark.parametrize("places", [(True,) * 4, (True, True, False, True)])
def test_viterbi_finds_the_best_of_all_paths(seam, places):
    """16 states, 4 places: all 4 beginnings and 4⁴ sequences of codes."""
    values, x, matters = normal(16, seed=1), normal(30, 4), torch.tensor(places)
    cut = None if seam is None else torch.full((30,), seam)
    states = _path(x, matters, values, 2, cut)
    # each state goes on from the one before
    assert torch.equal(states[:, 1:] >> 2, states[:, :-1] & 3)
    costs = ((x - values[states]) ** 2 * matters).sum(1)
    every = []
    for first, *codes in itertools.product(range(4), repeat=5):
        state, path = first, []
        for code in codes:
            state = (state << 2 | code) & 15
            path.append(state)
        if seam is None or (first == seam and state & 3 == seam):
            every.append(path)
    best = ((x[:, None] - values[torch.tensor(every)]) ** 2 * matters).sum(-1).amin(1)
    torch.testing.assert_close(costs, best, rtol=1e-5, atol=1e-6)
    assert seam is None or bool(((states[:, -1] & 3) == seam).all())


@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_the_error_of_normal_numbers_is_between_shannon_and_lloyd_max(bits):
    x = normal(48, 128, seed=bits)
    scale = x.abs().mean()
    codes = encode_trellis(x / scale, bits)
    assert int(codes.max()) < 1 << bits
    error = float((decode_trellis(codes, bits) * scale - x).square().mean() / x.square().mean())
    assert 0.25**bits < error < 0.65 * LLOYD_MAX[bits]


def test_the_ring_is_near_to_the_best_of_all_rings():
    """At 4 bits there are 256 places to cut; the search takes the one that a path without ends finds."""
    x = normal(3, 128, seed=5) * 1.25
    found = (decode_trellis(encode_trellis(x, 4), 4) - x).square().sum(1)
    values, matters, seams = _by_digits(4, x.device), torch.ones(128, dtype=torch.bool), 256
    ratios = []
    for row, cost in zip(x, found, strict=True):
        states = _path(row.expand(seams, -1), matters, values, 4, torch.arange(seams))
        best = (values[states] - row).square().sum(1).amin()
        assert best * (1 - 1e-5) <= cost
        ratios.append(float(cost / best))
    assert sum(ratios) / len(ratios) < 1.04, ratios


def test_codes_of_a_ring_may_be_turned():
    codes = torch.randint(0, 8, (3, 40), generator=torch.Generator().manual_seed(0)).byte()
    assert torch.equal(decode_trellis(codes.roll(7, -1), 3), decode_trellis(codes, 3).roll(7, -1))


def test_places_that_do_not_matter_change_nothing_and_help():
    x = normal(4, 24, seed=3)
    x[:, 9:] = 50.0
    few = encode_trellis(x, 2, 9)
    again = x.clone()
    again[:, 9:] = -3.0
    assert torch.equal(encode_trellis(again, 2, 9), few)
    errors = [(decode_trellis(c, 2) - x)[:, :9].square().sum() for c in (few, encode_trellis(x, 2))]
    assert errors[0] < 0.5 * errors[1]


def test_zeros_are_zeros():
    assert not decode_trellis(torch.zeros(1, 24, dtype=torch.uint8), 2).any()
    zeros = decode_trellis(encode_trellis(torch.zeros(1, 24), 2), 2)
    assert not zeros.any()
