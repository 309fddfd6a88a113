"""Layers that learn to be 2:4: their matmuls against float64, and all that training puts around them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ao_core.ext import ConfigError
from ao_core.testing.base import gaussian, same_bits
from ao_sparsity import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    SupermaskLinear,
    squash_masks,
    tile_mask,
)
from ao_sparsity.masks import n_of_m_mask

DECAYING = partial(SemiSparseLinear, decay=0.25)
MASKED = partial(SupermaskLinear, blocksize=8, sparsity=0.6)
KINDS = pytest.mark.parametrize(
    "kind", [SemiSparseLinear, DECAYING, SemiSparseActivationLinear, MASKED]
)


@pytest.fixture
def layer_of(make_layer):
    """(class, or partial of one) -> a layer 22 -> 35 of it, in float32."""
    return lambda kind, dtype=torch.float32: make_layer(kind, (22, 35), dtype)


def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input and those of all parameters, for a loss that is not linear."""
    x = x.clone().requires_grad_(True)
    layer.zero_grad()
    out = layer(x)
    (out * gaussian(tuple(out.shape), seed=9).to(out.dtype)).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("batch", [(5,), (2, 3), (), (0,)])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_semi_sparse_matmuls(layer_of, batch, decay):
    """Against autograd in float64: y = x (w ⊙ m)ᵀ, dx = g (w ⊙ m), dw = gᵀ x + decay · w ⊙ (1 − m)."""
    layer = layer_of(partial(SemiSparseLinear, decay=decay))
    x = gaussian((*batch, 22), seed=5)
    out, grad_x, grad_w, grad_b = run(layer, x)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    mask = tile_mask(layer.weight)
    assert int(mask.sum()) < 0.55 * mask.numel()
    kept = torch.where(mask, weight, 0).requires_grad_(True)
    wide = x.double().requires_grad_(True)
    expected = F.linear(wide, kept, bias)
    (expected * gaussian(tuple(expected.shape), seed=9).double()).sum().backward()
    exact = partial(torch.testing.assert_close, check_dtype=False, rtol=1e-5, atol=1e-5)
    exact(out, expected.detach())
    exact(grad_x, wide.grad)
    exact(grad_w, kept.grad + decay * torch.where(mask, 0, weight))
    exact(grad_b, gaussian(tuple(out.shape), seed=9).double().reshape(-1, 35).sum(0))


def test_sparse_in_both_directions(layer_of):
    """The matmuls see two of four along the rows, and along the columns."""
    layer = layer_of(SemiSparseLinear)
    seen = layer(torch.eye(22)).detach() - layer.bias.detach()  # (22, 35): the weight, transposed
    for matrix in (seen, seen.t()):
        columns = matrix.shape[1]
        groups = F.pad(matrix, (0, -columns % 4)).reshape(len(matrix), -1, 4)
        assert int((groups != 0).sum(-1).max()) == 2


def test_activations_have_the_gradients_of_what_is_computed(layer_of):
    """`gradcheck` in float64: no straight-through, since what is dropped does not come back."""
    layer = layer_of(SemiSparseActivationLinear, torch.float64)
    x = gaussian((3, 22), seed=5).double().requires_grad_(True)
    weight, bias = layer.weight, layer.bias
    assert torch.autograd.gradcheck(lambda *a: F.linear(_kept(a[0]), a[1], a[2]), (x, weight, bias))
    for expected, actual in zip(
        run(_Reference(layer), x.detach()), run(layer, x.detach()), strict=True
    ):
        assert torch.equal(expected, actual)
    _, grad_x, _, _ = run(layer, x.detach())
    dropped = ~n_of_m_mask(x.detach().abs(), 2, 4)
    assert int(dropped.sum()) == 3 * 10  # two of each of five groups; the last group has but two
    assert not grad_x[dropped].any()
    assert grad_x[~dropped].all()


class _Reference(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x):
        return F.linear(_kept(x), self.weight, self.bias)


def _kept(x: torch.Tensor) -> torch.Tensor:
    """What stays of the input, by sorting each group of four in Python."""
    zeros = torch.zeros_like(x, dtype=torch.bool)
    for row, values in enumerate(x.detach().abs().tolist()):
        for start in range(0, len(values), 4):
            group = range(start, min(start + 4, len(values)))
            for column in sorted(group, key=lambda c: -values[c])[:2]:
                zeros[row, column] = True
    return x * zeros


@KINDS
def test_no_grad_equals_grad(layer_of, kind):
    layer, x = layer_of(kind), gaussian((5, 22), seed=5)
    expected = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)


@KINDS
def test_autocast(layer_of, kind):
    """Matmuls in bfloat16, gradients in the dtype of the parameters."""
    layer, x = layer_of(kind), gaussian((5, 22), seed=5)
    exact = run(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer, x)
    assert found[0].dtype == torch.bfloat16
    for expected, actual in zip(exact[1:], found[1:], strict=True):
        assert actual.dtype == expected.dtype == torch.float32
        assert 0 < float((actual - expected).norm() / expected.norm()) < 0.05


def test_autocast_keeps_what_squashing_keeps():
    """Weights that are equal in 16 bits do not decide otherwise than those that are stored."""
    layer = SemiSparseLinear(256, 256, bias=False)
    with torch.no_grad():
        layer.weight.copy_(gaussian((256, 256)))
    kept = layer.effective_weight().detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(torch.eye(256)).t()
    assert torch.equal(found, kept.bfloat16())


@KINDS
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(layer_of, kind, reentrant):
    layer, x = layer_of(kind), gaussian((5, 22), seed=5)

    class Again(nn.Module):
        def forward(self, x):
            return checkpoint(layer, x, use_reentrant=reentrant)

    again = Again()
    again.layer = layer
    for expected, actual in zip(run(layer, x), run(again, x), strict=True):
        assert same_bits(expected, actual)


@KINDS
def test_compiles_and_exports(layer_of, kind):
    """One graph, forward and backward, with the results of eager; also exported."""
    import torch._dynamo.testing

    layer, x = layer_of(kind), gaussian((5, 22), seed=5)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=counter)
    for seed in (5, 6):
        x = gaussian((5, 22), seed=seed)
        for expected, actual in zip(run(layer, x), run(compiled, x), strict=True):
            torch.testing.assert_close(actual, expected)
        with torch.no_grad():  # other weights have another mask in the same code
            for each in (layer, compiled):
                each.weight.add_(gaussian((35, 22), seed=7))
    assert counter.frame_count == 1
    torch._dynamo.reset()
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("transposed", [False, True])
def test_ops(transposed):
    """What torch asks of custom operators: schema, fake tensors, tracing."""
    weight, x = gaussian((12, 20), seed=1), gaussian((3, 12 if transposed else 20), seed=2)
    ops = torch.ops.ao_sparsity
    torch.library.opcheck(ops.tile_mask, (weight,))
    torch.library.opcheck(ops.tile_mask, (weight.t(),))
    torch.library.opcheck(ops.semi_sparse_mm, (x, weight, tile_mask(weight), transposed))
    both = gaussian((3, 20), seed=2).requires_grad_(True), weight.requires_grad_(True)
    torch.library.opcheck(ops.straight_through_mm, (*both, tile_mask(weight), 0.5))


@KINDS
def test_copies_and_dtypes(layer_of, kind):
    layer, x = layer_of(kind), gaussian((5, 22), seed=5)
    again = copy.deepcopy(layer)
    assert type(again) is type(layer)
    assert torch.equal(again(x), layer(x))
    with torch.no_grad():
        again.weight.zero_()
    assert layer.weight.any()
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@KINDS
def test_learns(layer_of, kind):
    """A sparse layer learns a sparse relation that it does not have at first: the loss falls by half."""
    target = layer_of(kind)
    layer = copy.deepcopy(target)
    with torch.no_grad():
        target.weight.copy_(gaussian((35, 22), seed=20))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-2, weight_decay=0)
    losses = []
    for step in range(60):
        x = gaussian((64, 22), seed=100 + step)
        loss = F.mse_loss(layer(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_decay_shrinks_what_is_not_kept(layer_of):
    """With no gradient but the decay, kept weights stay and the others shrink at its rate."""
    layer = layer_of(DECAYING)
    before, mask = layer.weight.detach().clone(), tile_mask(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.zeros(2, 22)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(
        layer.weight.detach(), torch.where(mask, before, before * (1 - 0.025))
    )


def test_nan_is_seen(layer_of):
    """A weight that broke is not masked away."""
    for kind in (SemiSparseLinear, MASKED):
        layer = layer_of(kind)
        with torch.no_grad():
            layer.weight[3, 4] = float("nan")
        assert layer(torch.ones(1, 22)).isnan().any()


@pytest.mark.parametrize("decay", [-0.1, float("nan")])
def test_decay_is_a_number_from_zero_on(decay):
    with pytest.raises(ConfigError, match=f"decay={decay}"):
        SemiSparseLinear(4, 4, decay=decay)


@KINDS
def test_a_layer_of_its_own(kind):
    """Made without a dense one before, as `nn.Linear` is, also on the meta device."""
    assert "in_features=9, out_features=6" in repr(kind(9, 6, device="meta"))
    layer = kind(9, 6, bias=False, dtype=torch.float64)
    assert layer(torch.ones(2, 9, dtype=torch.float64)).shape == (2, 6)
    assert squash_masks(nn.Sequential(layer)).keys() == (
        set() if kind is SemiSparseActivationLinear else {"0"}
    )
