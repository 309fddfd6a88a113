"""The kernel of `tile_mask`: against a search among all patterns, with values that are hard to compare."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.ext import registry
from ao_core.testing.base import gaussian
from ao_kernels.cpu.library import load
from ao_kernels.cpu.tile_mask import tile_mask

PAIRS = [torch.tensor([i in pair for i in range(4)]) for pair in combinations(range(4), 2)]
#: all tiles with two of four in each row and column, (90, 4, 4)
PATTERNS = torch.stack(
    [
        torch.stack(rows)
        for rows in product(PAIRS, repeat=4)
        if torch.stack(rows).sum(0).tolist() == [2] * 4
    ]
)


def tiles(x: Tensor) -> Tensor:
    """(tiles, 4, 4) of a matrix filled up with zeros."""
    filled = F.pad(x, (0, -x.shape[1] % 4, 0, -x.shape[0] % 4))
    return filled.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (4, 64), (7, 131), (40, 260), (0, 8), (3, 0)])
def test_keeps_as_much_as_any_pattern(shape: tuple[int, int], dtype: torch.dtype) -> None:
    load()
    weight = gaussian(shape).to(dtype)
    mask = tile_mask(weight)
    assert mask.dtype == torch.bool
    assert mask.shape == weight.shape
    assert mask.is_contiguous()
    kept, size = tiles(mask), tiles(weight.double().abs())
    assert len(PATTERNS) == 90
    assert not kept.numel() or int(torch.stack([kept.sum(1), kept.sum(2)]).max()) <= 2
    best = torch.stack([(size * pattern).sum((1, 2)) for pattern in PATTERNS]).amax(0)
    assert ((size * kept).sum((1, 2)) >= best * (1 - 1e-6)).all()


def test_strided_weights_and_ties() -> None:
    load()
    weight = gaussian((64, 48))
    assert torch.equal(tile_mask(weight.t()), tile_mask(weight.t().contiguous()))
    assert torch.equal(tile_mask(weight[::2]), tile_mask(weight[::2].contiguous()))
    for value in (0.0, 1.0, torch.inf, torch.nan):
        kept = tiles(tile_mask(torch.full((8, 8), value)))
        assert (kept.sum(1) == 2).all()
        assert (kept.sum(2) == 2).all()


def test_what_is_not_finite_stays() -> None:
    load()
    weight = gaussian((4, 8)) * 1e30
    weight[0, 1], weight[2, 5], weight[3, 6] = torch.nan, torch.inf, -torch.inf
    mask = tile_mask(weight)
    assert mask[0, 1]
    assert mask[2, 5]
    assert mask[3, 6]


def test_calls() -> None:
    kernel = registry.kernels.get("cpu_tile_mask")

    class Call:
        x_shape = (4, 4)
        x_dtype = torch.float64

    assert "not torch.float64" in str(kernel.refuses(Call()))
