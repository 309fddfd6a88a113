"""Matmuls with block-sparse weights in Triton's interpreter, on ragged shapes, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core.testing.base import gaussian
from ao_kernels.triton.bsr import launch as bsr
from ao_kernels.triton.bsr.layout import SIDES, order_of
from ao_kernels.triton.shared.tile_config import LaunchConfig

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

#: rows of blocks of very different length, one of them empty, sizes that blocks do not divide
SHAPES = ((140, 300), (64, 128), (20, 33))


def problem(shape, side, dtype=torch.float16):
    """A weight with blocks of zeros, and its parts."""
    weight = gaussian(shape).to(dtype)
    n, k = shape
    rows, cols = -(-n // side), -(-k // side)
    kept = gaussian((rows, cols), seed=3) > 0.5
    kept[0] = True
    kept[1:2] = False
    weight *= kept.repeat_interleave(side, 0).repeat_interleave(side, 1)[:n, :k]
    padded = F.pad(weight, (0, cols * side - k, 0, rows * side - n))
    tiled = padded.view(rows, side, cols, side).transpose(1, 2)
    starts = F.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    col_indices = kept.nonzero()[:, 1].to(torch.int32)
    return weight, (tiled[kept].contiguous(), col_indices, starts, order_of(starts))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPES[0], torch.float16),
        (SHAPES[1], torch.float32),
        pytest.param(SHAPES[0], torch.float32, marks=pytest.mark.slow),
        (SHAPES[2], torch.float16),
    ],
)
def test_linear(side, shape, dtype):
    weight, parts = problem(shape, side, dtype)
    n, k = shape
    bias = gaussian((n,), seed=7).to(dtype)
    bound = 1e-6 if dtype == torch.float32 else 5e-4
    for m, splits in ((0, 1), (1, 2), (17, 1), (70, 4)):
        x = gaussian((m, k), seed=m).to(dtype)
        setting = LaunchConfig(bsr.tile_config_of(m, side, dtype), splits)
        out = bsr.launch(x, *parts, bias, n, k, setting=setting)
        expected = x.double() @ weight.double().t() + bias.double()
        assert (out.shape, out.dtype) == ((m, n), dtype)
        assert (out.double() - expected).norm() <= bound * expected.norm()


def test_every_number_of_splits():
    weight, parts = problem((64, 4096), 64)
    x = gaussian((3, 4096)).half()
    expected, tile = x.double() @ weight.double().t(), bsr.tile_config_of(3, 64, x.dtype)
    for splits in (1, 2, 4, 8):
        out = bsr.launch(x, *parts, None, 64, 4096, setting=LaunchConfig(tile, splits))
        assert (out.double() - expected).norm() <= 5e-4 * expected.norm()


def test_a_weight_without_blocks():
    _, (blocks, cols, starts, order) = problem((40, 70), 16)
    empty = (blocks[:0], cols[:0], starts * 0, order)
    bias = gaussian((40,)).half()
    out = bsr.bsr_linear(gaussian((3, 70)).half(), *empty, bias, 40, 70)
    assert torch.equal(out, bias.expand(3, 40))


@pytest.mark.parametrize("side", [16, 64])
def test_what_is_not_finite_meets_only_stored_blocks(side):
    """Of columns that no block has, nothing is read."""
    _, parts = problem((140, 300), side)
    x = gaussian((3, 300)).half()
    x[1, 299] = torch.inf
    out = bsr.bsr_linear(x, *parts, None, 140, 300)
    last = (parts[1] == 299 // side).nonzero().flatten()
    rows = torch.bucketize(last, parts[2].long(), right=True) - 1
    touched = torch.zeros(-(-140 // side), dtype=torch.bool)
    touched[rows] = True
    assert out[[0, 2]].isfinite().all()
    assert torch.equal(~out[1].isfinite(), touched.repeat_interleave(side)[:140])


def test_inputs_of_any_rank_and_stride():
    _, parts = problem((140, 300), 32)
    x = gaussian((2, 3, 300)).half()
    out = bsr.bsr_linear(x, *parts, None, 140, 300)
    assert out.shape == (2, 3, 140)
    assert torch.equal(bsr.bsr_linear(x[0, 0], *parts, None, 140, 300), out[0, 0])
    strided = x[0].t().contiguous().t()
    assert torch.equal(bsr.bsr_linear(strided, *parts, None, 140, 300), out[0])


def test_long_rows_come_first():
    _, (_, _, starts, order) = problem((300, 300), 16)
    lengths = starts.diff()[order.long()]
    assert bool((lengths.diff() <= 0).all())
    assert sorted(order.tolist()) == list(range(len(order)))


def test_custom_op():
    _, parts = problem((20, 33), 16)
    x = gaussian((2, 3, 33)).half()
    results = torch.library.opcheck(torch.ops.ao_kernels.bsr_linear, (x, *parts, None, 20, 33))
    assert set(results.values()) == {"SUCCESS"}, results
