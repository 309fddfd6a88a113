"""The parts of `bsr` against torch's own block sparse tensors, and what its sizes follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import NO_SCALE, QuantizationError, UnsupportedOp


def spec(b, sparsity=None, dtype="fp32", scale=NO_SCALE, zero_point="none", block=(1, WHOLE)):
    options = (
        (("blocksize", b),) if sparsity is None else (("blocksize", b), ("sparsity", sparsity))
    )
    return Spec(dtype, block, scale, zero_point, "bsr", options=options)


def weight(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_holes(n, k, b, seed):
    """A matrix of which about half of the blocks are zeros, some of them negative ones."""
    x = weight(n, k, seed=seed)
    kept = torch.rand(-(-n // b), -(-k // b), generator=torch.Generator().manual_seed(seed)) < 0.5
    return x * kept.repeat_interleave(b, 0).repeat_interleave(b, 1)[:n, :k], int(kept.sum())


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta:UserWarning")
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**31 - 1))
def test_is_what_torch_calls_bsr(n, k, b, seed):
    x, blocks = with_holes(n, k, b, seed)
    q = quantize_tensor(x, spec(b))
    assert torch.equal(q.dequantize(), x)
    padded = F.pad(x, (0, -k % b, 0, -n % b))
    size = tuple(padded.shape)
    theirs = torch.sparse_bsr_tensor(
        q.crow_indices, q.col_indices, q.qdata, size, check_invariants=True
    )
    assert torch.equal(theirs.to_dense(), padded)
    assert len(q.qdata) == blocks
    assert q.stored_bytes == 4 * (blocks * (b * b + 1) + -(-n // b) + 1)
    # in order, and each once
    rows = torch.repeat_interleave(torch.arange(len(q.crow_indices) - 1), q.crow_indices.diff())
    places = rows * -(-k // b) + q.col_indices
    assert bool((places.diff() > 0).all())


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 17), st.floats(0, 1))
def test_a_share_of_blocks_goes(n, k, b, sparsity):
    x = weight(n, k, seed=n * 41 + k)
    q = quantize_tensor(x, spec(b, sparsity))
    blocks = -(-n // b) * -(-k // b)
    stay = max(blocks - round(sparsity * blocks), 1)
    assert len(q.qdata) == stay
    assert q.sparsity == 1 - stay / blocks
    dense = q.dequantize()
    assert torch.equal(dense[dense != 0], x[dense != 0])
    assert torch.equal(quantize_tensor(dense, spec(b, sparsity)).dequantize(), dense)
    norms = F.pad(x.double(), (0, -k % b, 0, -n % b)).unflatten(1, (-1, b)).unflatten(0, (-1, b))
    norms = norms.square().sum((1, 3))
    kept = F.pad(dense, (0, -k % b, 0, -n % b)).unflatten(1, (-1, b)).unflatten(0, (-1, b))
    kept = (kept != 0).any(3).any(1)
    if stay < blocks:
        assert norms[kept].min() >= norms[~kept].max()


def test_experts_are_matrices_one_after_the_other():
    x = weight(3, 20, 30)
    q = quantize_tensor(x, spec(8, 0.5))
    assert q.crow_indices.shape == (3 * 3 + 1,)
    one = [quantize_tensor(matrix, spec(8, 0.5)) for matrix in x]
    assert torch.equal(q.dequantize(), torch.stack([each.dequantize() for each in one]))
    assert torch.equal(q.qdata, torch.cat([each.qdata for each in one]))
    assert torch.equal(q.col_indices, torch.cat([each.col_indices for each in one]))


@pytest.mark.parametrize(
    "of",
    [
        spec(16, dtype="int8", scale="float32"),
        spec(16, dtype="int4", scale="bfloat16", block=(1, 32)),
        spec(16, dtype="uint4", scale="bfloat16", zero_point="int", block=(1, 32)),
        spec(16, dtype="f8e4m3", scale="float32", block=(WHOLE, WHOLE)),
    ],
    ids=str,
)
def test_absent_blocks_are_exactly_zero(of):
    x, blocks = with_holes(64, 96, 16, 3)
    x += 0.5 * (x != 0)  # off centre, so that zero points are not in the middle
    q = quantize_tensor(x, of)
    assert len(q.qdata) == blocks
    assert not q.dequantize()[x == 0].any()
    assert 1 - blocks / 24 == q.sparsity


def test_other_blocks_need_other_memory():
    first, _ = with_holes(64, 64, 16, 0)
    q = quantize_tensor(first, spec(16))
    other = weight(64, 64)
    with pytest.raises(UnsupportedOp, match="'bsr'.*assign=True"):
        q.copy_(other)
    with pytest.raises(UnsupportedOp, match="'bsr'.*assign=True"):
        q.copy_(quantize_tensor(other, spec(16)))
    assert torch.equal(q.dequantize(), first)
    assert torch.equal(q.copy_(2 * first).dequantize(), 2 * first)
    assert not torch.zeros_like(q).dequantize().any()


def test_without_values_as_many_blocks_as_there_can_be():
    q = quantize_tensor(torch.empty(3, 20, 30, device="meta"), spec(8, 0.5))
    assert q.stored_bytes == quantize_tensor(weight(3, 20, 30), spec(8, 0.5)).stored_bytes


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((77,), (), "two dimensions"),
        ((8, 8), (("blocksize", 0),), "blocksize >= 1"),
        ((8, 8), (("sparsity", 1.5),), "sparsity <= 1"),
    ],
)
def test_what_does_not_fit(shape, options, reason):
    with pytest.raises(QuantizationError, match=reason):
        quantize_tensor(
            torch.ones(shape), Spec("fp32", (1, WHOLE), NO_SCALE, layout="bsr", options=options)
        )
