"""Layers by name, there and back: what stays the same object, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from ao_core import WHOLE, ComputeWeight, Spec, quantize_tensor
from ao_core.ext import ConfigError
from ao_core.ext.quantizing import EmulationWarning
from ao_core.testing.base import gaussian, same_bits
from ao_sparsity import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    SupermaskLinear,
    squash_masks,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
    tile_mask,
)

X = gaussian((6, 22), seed=5)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    inner = OrderedDict(up=nn.Linear(35, 50), act=nn.ReLU(), down=nn.Linear(50, 35))
    layers = OrderedDict(first=nn.Linear(22, 35), mlp=nn.Sequential(inner), norm=nn.LayerNorm(35))
    return nn.Sequential(layers)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_there_and_back(model):
    """Modules, parameters, hooks and keys stay; so does an optimizer, which steps as if nothing was."""
    calls = []
    model.mlp.up.register_forward_hook(lambda *_: calls.append("hook"))
    model.mlp.down.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys, dense = list(model.state_dict()), copy.deepcopy(model)(X)
    moments = {id(p): optimizer.state[p]["exp_avg"] for p in parameters.values()}

    config = {"first": SemiSparseActivationLinear, "mlp.up": partial(SemiSparseLinear, decay=0.1)}
    swap_linear_with_semi_sparse_linear(model, config | {"mlp.down": SemiSparseLinear})
    assert [type(model.first), type(model.mlp.up), type(model.mlp.down), model.mlp.up.decay] == [
        SemiSparseActivationLinear,
        SemiSparseLinear,
        SemiSparseLinear,
        0.1,
    ]
    assert all(a is b for a, b in zip(model.modules(), modules.values(), strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert list(model.state_dict()) == keys
    assert not model.mlp.down.training
    assert not torch.allclose(model(X), dense)
    step(model, optimizer)
    assert all(optimizer.state[p]["exp_avg"] is moments[id(p)] for p in parameters.values())
    assert all(int(optimizer.state[p]["step"]) == 2 for p in parameters.values())

    swap_semi_sparse_linear_with_linear(model)
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [nn.Linear] * 3
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert list(model.state_dict()) == keys
    assert vars(model.first).keys() == vars(nn.Linear(2, 2)).keys()
    assert len(calls) == 4
    step(model, optimizer)
    assert all(int(optimizer.state[p]["step"]) == 3 for p in parameters.values())


def test_one_warning_that_it_is_slower(model):
    with pytest.warns(EmulationWarning, match=r"2:4 .* for 2 weights \(2 on cpu\)") as found:
        swap_linear_with_semi_sparse_linear(
            model, {"first": SemiSparseLinear, "mlp.up": SemiSparseLinear}
        )
    assert [w.filename for w in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_linear_with_semi_sparse_linear(model, {"mlp.down": SemiSparseActivationLinear})
        on_meta = nn.Sequential(nn.Linear(16, 16, device="meta"))
        swap_linear_with_semi_sparse_linear(on_meta, {"0": SemiSparseLinear})


def test_weights_are_dense_again(model):
    """Swapping back drops the masks, not the weights."""
    before = copy.deepcopy(model)
    swap_linear_with_semi_sparse_linear(
        model, {"first": SemiSparseLinear, "mlp.up": SupermaskLinear}
    )
    swap_semi_sparse_linear_with_linear(model)
    assert same_bits(model(X), before(X))
    assert model.state_dict().keys() == before.state_dict().keys()


def test_twice_is_once(model):
    """The same again changes nothing; other options of the class are taken."""
    config = {
        "first": partial(SupermaskLinear, blocksize=8, sparsity=0.5),
        "mlp.up": SemiSparseLinear,
    }
    swap_linear_with_semi_sparse_linear(model, config)
    with torch.no_grad():
        model.first.scores.mul_(2)
    expected, state = model(X), copy.deepcopy(model.state_dict())
    swap_linear_with_semi_sparse_linear(model, config)
    assert torch.equal(model(X), expected)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    swap_linear_with_semi_sparse_linear(model, {"mlp.up": partial(SemiSparseLinear, decay=0.5)})
    assert model.mlp.up.decay == 0.5
    for _ in range(2):
        swap_semi_sparse_linear_with_linear(model)
    assert type(model.first) is nn.Linear


def test_the_model_itself_and_shared_layers():
    layer = nn.Linear(22, 35)
    swap_linear_with_semi_sparse_linear(layer, {"": SemiSparseLinear})
    assert type(layer) is SemiSparseLinear
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, shared)
    swap_linear_with_semi_sparse_linear(twice, {"0": SemiSparseLinear, "1": SemiSparseLinear})
    assert twice[0] is twice[1]
    swap_semi_sparse_linear_with_linear(twice)
    both = {"0": SemiSparseLinear, "1": SemiSparseActivationLinear}
    with pytest.raises(ConfigError, match="'1' is a layer that another name gives another class"):
        swap_linear_with_semi_sparse_linear(twice, both)
    assert type(shared) is nn.Linear


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"mlp.upp": SemiSparseLinear}, "no module 'mlp.upp'; did you mean 'mlp.up'"),
        ({"xyz": SemiSparseLinear}, "linear layers: first, mlp.up, mlp.down"),
        (
            {"norm": SemiSparseLinear},
            "'norm' cannot become a SemiSparseLinear: a LayerNorm is not a plain",
        ),
        ({"mlp": SemiSparseLinear}, "'mlp' cannot become"),
        ({"first": nn.Linear}, "is not a layer of sparse training"),
        ({"first": "SemiSparseLinear"}, "is not a layer of sparse training"),
        ({"first": partial(SemiSparseLinear, 3)}, "is not a layer of sparse training"),
        ({"first": partial(SemiSparseLinear, decay=-1)}, "decay=-1"),
        ({"first": partial(SemiSparseLinear, bias=False)}, "unexpected keyword argument 'bias'"),
        ({"first": partial(SupermaskLinear, blocksize=0)}, "blocksize=0"),
        ({"first": partial(SupermaskLinear, sparsity=1.5)}, "sparsity=1.5"),
    ],
)
def test_refusals(model, config, says):
    """Each says why, and no layer is changed, not even those named before."""
    with pytest.raises(ConfigError, match=says):
        swap_linear_with_semi_sparse_linear(model, {"mlp.down": SemiSparseLinear, **config})
    assert type(model.mlp.down) is nn.Linear


def test_refuses_other_classes(model):
    swap_linear_with_semi_sparse_linear(model, {"first": partial(SupermaskLinear, blocksize=8)})
    with pytest.raises(ConfigError, match="is a SupermaskLinear already; swap it back first"):
        swap_linear_with_semi_sparse_linear(model, {"first": SemiSparseLinear})
    with pytest.raises(ConfigError, match="blocksize=4: its scores are of blocks of 8"):
        swap_linear_with_semi_sparse_linear(model, {"first": partial(SupermaskLinear, blocksize=4)})
    row = Spec("int8", (1, WHOLE))
    model.mlp.up.weight = nn.Parameter(ComputeWeight(model.mlp.up.weight.detach(), row))
    with pytest.raises(ConfigError, match="its weight is a ComputeWeight"):
        swap_linear_with_semi_sparse_linear(model, {"mlp.up": SemiSparseLinear})


def test_refuses_layers_that_torch_does_not_call():
    """In evaluation an encoder layer reads its weights itself, unless that is turned off."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
    model, x = nn.Sequential(layer), gaussian((2, 3, 8), seed=1)
    with pytest.raises(ConfigError, match="set_fastpath_enabled"):
        swap_linear_with_semi_sparse_linear(model, {"0.linear1": SemiSparseLinear})
    with pytest.raises(
        ConfigError, match="NonDynamicallyQuantizableLinear is not a plain nn.Linear"
    ):
        swap_linear_with_semi_sparse_linear(model, {"0.self_attn.out_proj": SemiSparseLinear})
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        swap_linear_with_semi_sparse_linear(model, {"0.linear1": SemiSparseLinear})
        trained = model(x).detach()
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), trained)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_squash_keeps_the_function(model):
    """Outputs stay; the weights have the zeros, exactly so many."""
    config = {
        "first": SemiSparseLinear,
        "mlp.up": partial(SupermaskLinear, blocksize=5, sparsity=0.5),
        "mlp.down": SemiSparseActivationLinear,
    }
    swap_linear_with_semi_sparse_linear(model, config)
    expected, mask = model(X).detach(), tile_mask(model.first.weight)
    parameter = model.first.weight
    shares = squash_masks(model)
    assert model.first.weight is parameter
    assert [type(model.first), type(model.mlp.up)] == [nn.Linear, nn.Linear]
    assert type(model.mlp.down) is SemiSparseActivationLinear
    torch.testing.assert_close(model(X).detach(), expected)
    assert torch.equal(model.first.weight != 0, mask)
    assert shares == {"first": pytest.approx(1 - float(mask.float().mean())), "mlp.up": 0.5}
    assert squash_masks(model) == {}


def test_squashed_weights_are_stored_smaller(model):
    """In the layouts of sparse weights nothing is lost, and nothing that is zero is stored."""
    config = {
        "first": SemiSparseLinear,
        "mlp.up": partial(SupermaskLinear, blocksize=5, sparsity=0.8),
    }
    swap_linear_with_semi_sparse_linear(model, config)
    squash_masks(model)
    two_four = Spec("fp32", (1,), "none", layout="two_four")
    blocks = Spec("fp32", (1,), "none", layout="bsr", options=(("blocksize", 5),))
    for layer, spec in ((model.first, two_four), (model.mlp.up, blocks)):
        stored = quantize_tensor(layer.weight.detach(), spec)
        assert torch.equal(stored.dequantize(), layer.weight)
    assert stored.qdata.shape == (14, 5, 5)  # a fifth of 10 × 7 blocks
