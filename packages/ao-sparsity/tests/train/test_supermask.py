"""Blocks that learn whether they stay: how many do, and gradients against float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ao_core.ext import ConfigError
from ao_core.testing.base import gaussian
from ao_sparsity import SupermaskLinear, set_sparsity, squash_masks


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.floats(0, 1))
def test_so_many_blocks_exactly(rows, columns, blocksize, sparsity):
    """The best by score, whole, and of equal scores the first."""
    layer = SupermaskLinear(columns, rows, blocksize=blocksize, sparsity=sparsity)
    with torch.no_grad():
        layer.weight.fill_(2)
        layer.scores.copy_(torch.arange(layer.scores.numel()).view_as(layer.scores) % 5)
    count = layer.scores.numel()
    assert layer.scores.shape == (-(-rows // blocksize), -(-columns // blocksize))
    mask = layer.block_mask()
    assert int(mask.sum()) == count - round(sparsity * count)
    values = layer.scores.detach().flatten().tolist()
    best = sorted(range(count), key=lambda i: -values[i])[: int(mask.sum())]
    assert sorted(best) == mask.flatten().nonzero().flatten().tolist()
    blocks = np.kron(mask.numpy(), np.full((blocksize, blocksize), 2.0))[:rows, :columns]
    np.testing.assert_array_equal(layer.effective_weight().detach().numpy(), blocks)


def test_scores_begin_as_norms(make_layer):
    layer = make_layer(partial(SupermaskLinear, blocksize=10), (22, 35))
    norms = torch.stack(
        [
            torch.stack([part.norm() for part in rows.split(10, 1)])
            for rows in layer.weight.detach().double().split(10, 0)
        ]
    )
    torch.testing.assert_close(
        layer.scores.detach().double(), norms / norms.mean(), rtol=1e-6, atol=0
    )
    assert SupermaskLinear(8, 8, blocksize=4).scores.isfinite().all()


def test_gradients(make_layer):
    """Against autograd in float64: a score's is that of a factor before its block, kept or not."""
    layer = make_layer(partial(SupermaskLinear, blocksize=8, sparsity=0.6), (22, 35))
    x = gaussian((5, 22), seed=5).requires_grad_(True)
    layer(x).square().sum().backward()
    weight = layer.weight.detach().double().requires_grad_(True)
    factor = layer.block_mask().double().requires_grad_(True)
    wide = x.detach().double().requires_grad_(True)
    spread = factor.repeat_interleave(8, 0).repeat_interleave(8, 1)[:35, :22]
    F.linear(wide, weight * spread, layer.bias.detach().double()).square().sum().backward()
    for expected, actual in (
        (weight.grad, layer.weight.grad),
        (factor.grad, layer.scores.grad),
        (wide.grad, x.grad),
    ):
        torch.testing.assert_close(actual, expected, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert layer.scores.grad[~layer.block_mask()].any()
    gone = ~spread.detach().bool()
    assert not layer.weight.grad[gone].any()


def test_blocks_come_back():
    """A relation in blocks that are gone at first is found: the scores of those alone are learned."""
    layer = SupermaskLinear(16, 16, bias=False, blocksize=8, sparsity=0.5)
    with torch.no_grad():
        layer.weight.copy_(gaussian((16, 16), seed=1))
        layer.scores.copy_(torch.tensor([[2.0, 2.0], [1.0, 1.0]]))
    target = layer.weight.detach().clone()
    target[:8] = 0
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([layer.scores], lr=0.02)
    losses = []
    for number in range(50):
        x = gaussian((32, 16), seed=number)
        loss = F.mse_loss(layer(x), F.linear(x, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert layer.block_mask().tolist() == [[False, False], [True, True]]
    assert losses[0] > 1
    assert losses[-1] == 0


def test_a_schedule_needs_no_compilation():
    """Another share is another number in a tensor: compiled code stays."""
    import torch._dynamo.testing

    layer = SupermaskLinear(16, 16, blocksize=4)
    model = nn.Sequential(layer, nn.ReLU())
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = gaussian((3, 16), seed=1)
    for sparsity in (0.0, 0.5, 0.9):
        set_sparsity(model, sparsity)
        torch.testing.assert_close(compiled(x), model(x))
        assert int(layer.kept) == int(layer.block_mask().sum()) == 16 - round(16 * sparsity)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_state_is_in_checkpoints():
    """Scores and how many blocks stay load into another layer, which then computes the same."""
    layer, other = (SupermaskLinear(16, 16, blocksize=4, sparsity=s) for s in (0.7, 0.0))
    other.load_state_dict(layer.state_dict())
    x = gaussian((3, 16), seed=1)
    assert torch.equal(other(x), layer(x))
    assert sorted(layer.state_dict()) == ["bias", "kept", "scores", "weight"]


def test_errors():
    with pytest.raises(ConfigError, match="sparsity=-0.1"):
        SupermaskLinear(4, 4, sparsity=-0.1)
    with pytest.raises(ConfigError, match="has no SupermaskLinear"):
        set_sparsity(nn.Linear(4, 4), 0.5)
    model = nn.Sequential(SupermaskLinear(4, 4, blocksize=2))
    with pytest.raises(ConfigError, match="sparsity=2"):
        set_sparsity(model, 2)
    assert squash_masks(model) == {"0": 0.0}
