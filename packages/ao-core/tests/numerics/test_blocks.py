"""Blocks against slow Python loops, on ragged, empty and single-element shapes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.errors import ConfigError
from ao_core.numerics import (
    block_absmax,
    block_absmean,
    block_minmax,
    expand,
    full_block,
    grid_shape,
    split_blocks,
)
from ao_core.spec import WHOLE

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
blocks = st.lists(st.sampled_from([WHOLE, 1, 2, 3, 5, 100]), min_size=1, max_size=5).map(tuple)


def owner(index: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The block that an element belongs to, straight from the definition."""
    missing = len(index) - len(block)
    extents = [1] * missing + list(block[max(-missing, 0) :])
    return tuple(0 if e == WHOLE else i // e for i, e in zip(index, extents, strict=True))


def members(shape: tuple[int, ...], block: tuple[int, ...]) -> dict[tuple[int, ...], list]:
    found: dict[tuple[int, ...], list] = {}
    for index in itertools.product(*map(range, shape)):
        found.setdefault(owner(index, block), []).append(index)
    return found


@pytest.mark.parametrize(
    ("block", "shape", "full", "grid"),
    [
        ((32,), (4, 64), (1, 32), (4, 2)),
        ((1, 32), (4, 65), (1, 32), (4, 3)),
        ((1, WHOLE), (4, 64), (1, 64), (4, 1)),
        ((WHOLE, WHOLE), (4, 64), (4, 64), (1, 1)),
        ((WHOLE,), (4, 64), (1, 64), (4, 1)),
        ((128, 128), (4, 200), (4, 128), (1, 2)),
        ((1, 1, 32), (64,), (32,), (2,)),
        ((1, 32), (2, 3, 64), (1, 1, 32), (2, 3, 2)),
        ((1, 32), (0, 64), (1, 32), (0, 2)),
        ((2, 32), (4, 0), (2, 1), (2, 0)),
        ((1, WHOLE), (4, 0), (1, 1), (4, 1)),
        ((WHOLE, WHOLE), (0, 0), (1, 1), (1, 1)),
        ((4,), (), (), ()),
    ],
)
def test_full_block_and_grid_shape(block, shape, full, grid):
    assert full_block(block, shape) == full
    assert grid_shape(shape, block) == grid


@given(shapes, blocks)
def test_grid_has_one_entry_a_block(shape, block):
    grid = grid_shape(shape, block)
    owners = members(shape, block)
    assert len(grid) == len(shape)
    if math.prod(shape):
        assert set(owners) == set(itertools.product(*map(range, grid)))


@given(shapes, blocks, st.booleans())
def test_minmax_and_absmax_against_a_loop(shape, block, positive):
    """All-positive and all-negative data would show padding with zeros."""
    values = torch.rand(shape) + 0.5
    x = values if positive else -values
    low, high = block_minmax(x, block)
    absmax = block_absmax(x, block)
    assert low.shape == high.shape == absmax.shape == grid_shape(shape, block)
    owners = members(shape, block)
    for index in itertools.product(*map(range, low.shape)):
        inside = [x[i].item() for i in owners.get(index, [])] or [0.0]
        assert low[index].item() == min(inside)
        assert high[index].item() == max(inside)
        assert absmax[index].item() == max(map(abs, inside))


def test_minmax_of_mixed_signs():
    x = torch.tensor([[-3.0, 1.0, 2.0, -0.0, 5.0]])
    low, high = block_minmax(x, (1, 2))
    assert low.tolist() == [[-3.0, 0.0, 5.0]]
    assert high.tolist() == [[1.0, 2.0, 5.0]]
    assert block_absmax(x, (1, 2)).tolist() == [[3.0, 2.0, 5.0]]


def test_nan_stays_in_its_block():
    x = torch.ones(2, 10)
    x[0, 3] = math.nan
    absmax = block_absmax(x, (1, 4))
    assert absmax.isnan().tolist() == [[True, False, False], [False, False, False]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_reductions_keep_the_dtype(dtype):
    x = torch.randn(3, 10).to(dtype)
    assert block_absmax(x, (1, 4)).dtype == dtype
    assert torch.equal(block_absmax(x, (WHOLE, WHOLE)), x.abs().max().view(1, 1))


@given(shapes, blocks)
def test_expand_gives_every_element_its_block(shape, block):
    grid = torch.arange(math.prod(grid_shape(shape, block)), dtype=torch.float32)
    grid = grid.view(grid_shape(shape, block))
    wide = expand(grid, shape, block)
    for full, size, count in zip(shape, wide.shape, grid.shape, strict=True):
        assert size == (1 if count == 1 else full)
    wide = wide.broadcast_to(shape)
    for index in itertools.product(*map(range, shape)):
        assert wide[index] == grid[owner(index, block)]


@given(shapes, blocks)
def test_split_blocks_pairs_every_element_with_its_block(shape, block):
    x = torch.rand(shape)
    grid = torch.rand(grid_shape(shape, block))
    view, by_block = split_blocks(x, block, grid)
    assert torch.equal((view * by_block).reshape(shape), x * expand(grid, shape, block))
    if math.prod(shape):
        assert view.data_ptr() == x.data_ptr()


def test_split_blocks_copies_nothing_where_blocks_divide():
    x, grid = torch.rand(8, 64), torch.rand(2, 4)
    view, by_block = split_blocks(x, (4, 16), grid)
    assert view.shape == (2, 4, 4, 16)
    assert by_block.shape == (2, 1, 4, 1)
    assert (view.data_ptr(), by_block.data_ptr()) == (x.data_ptr(), grid.data_ptr())


def test_a_grid_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"must have shape \(4, 2\)"):
        expand(torch.ones(4, 3), (4, 64), (1, 32))


@given(shapes, blocks, st.integers(0, 1000))
def test_absmean(shape: tuple[int, ...], block: tuple[int, ...], seed: int):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    grid = block_absmean(x, block)
    assert (grid.shape, grid.dtype) == (grid_shape(shape, block), torch.float32)
    for place, indices in members(shape, block).items():
        mean = sum(abs(float(x[index])) for index in indices) / len(indices)
        assert float(grid[place]) == pytest.approx(mean, rel=1e-6)
