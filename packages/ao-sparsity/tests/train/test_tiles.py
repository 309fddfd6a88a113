"""Masks of tiles: 2:4 in both directions, and the best of all, by brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.testing.base import gaussian
from ao_sparsity.train.tiles import patterns, tile_mask


def all_patterns() -> np.ndarray:
    """Every 4 × 4 matrix of zeros and ones, out of 2**16, whose rows and columns all have two ones."""
    every = np.array(list(product((0, 1), repeat=16)), dtype=np.int64).reshape(-1, 4, 4)
    return every[(every.sum(1) == 2).all(1) & (every.sum(2) == 2).all(1)]


PATTERNS = all_patterns()


def tiles_of(matrix: np.ndarray) -> np.ndarray:
    """(N, K), filled up with zeros, as (tiles, 4, 4)."""
    n, k = matrix.shape
    filled = np.pad(matrix, ((0, -n % 4), (0, -k % 4)))
    rows, columns = filled.shape
    return filled.reshape(rows // 4, 4, columns // 4, 4).swapaxes(1, 2).reshape(-1, 4, 4)


def test_there_are_90_patterns():
    assert len(PATTERNS) == len(set(patterns())) == 90


@given(st.integers(1, 13), st.integers(1, 13), st.integers(0, 2**31 - 1))
def test_the_best_of_all_exactly(n, k, seed):
    """Small integers, so that sums are exact and ties are many: no pattern keeps more."""
    weight = np.random.default_rng(seed).integers(-6, 7, (n, k))
    kept = tile_mask(torch.from_numpy(weight).float()).numpy()
    assert kept.shape == (n, k)
    for tile, stays in zip(tiles_of(abs(weight)), tiles_of(kept), strict=True):
        assert (tile * stays).sum() == (PATTERNS * tile).sum((1, 2)).max()
        assert stays.sum(0).max() <= 2
        assert stays.sum(1).max() <= 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_best_of_all_for_any_dtype(dtype):
    weight = gaussian((72, 148), seed=3).to(dtype)
    kept = tile_mask(weight)
    assert torch.equal(kept.view(72, -1, 4).sum(-1), torch.full((72, 37), 2))
    assert torch.equal(kept.t().reshape(148, -1, 4).sum(-1), torch.full((148, 18), 2))
    tiles, stays = (tiles_of(t.double().numpy()) for t in (weight.abs(), kept))
    best = np.einsum("pij,tij->tp", PATTERNS, tiles).max(1)
    found = (tiles * stays).sum((1, 2))
    # of sums that differ by rounding, either may win
    np.testing.assert_allclose(found, best, rtol=0 if dtype == torch.float64 else 1e-6)
    assert found.sum() < 0.8 * tiles.sum()


def test_more_tiles_than_are_taken_at_once(monkeypatch):
    weight = gaussian((40, 36), seed=1)  # 90 tiles
    expected = tile_mask(weight)
    monkeypatch.setattr("ao_sparsity.train.tiles._AT_ONCE", 7)
    assert torch.equal(tile_mask(weight), expected)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (2, 3)])
def test_small_and_empty(shape):
    """At most two weights in each direction: all of a matrix of two rows and columns stays."""
    kept = tile_mask(torch.ones(shape))
    assert kept.shape == shape
    assert int(kept.sum()) == min(shape[0], 2) * min(shape[1], 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays(value):
    weight = gaussian((8, 8), seed=2)
    weight[1, 2] = weight[6, 5] = value
    kept = tile_mask(weight)
    assert kept[1, 2]
    assert kept[6, 5]
    assert int(kept.sum()) == 32


def test_the_largest_numbers_have_a_finite_sum():
    """Were sums infinite, all patterns with seven of these would be as good."""
    for pattern in torch.from_numpy(PATTERNS[::7]):
        weight = pattern.float() * torch.finfo(torch.float32).max
        assert torch.equal(tile_mask(weight), pattern.bool())
