"""Prepared models in programs: compilation, checkpoints, copies, optimizers, delays, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ao_core import ComputeWeight, FqnToConfig, QTensor, quantize_, quantize_tensor
from ao_core.ext import ConfigError
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_core.testing.base import gaussian
from ao_quant import Int4WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, QATConfig
from ao_quant.qat import Delay

INT4 = Int4WeightOnlyConfig(32)
SYMMETRIC = Int4WeightOnlyConfig(32, symmetric=True)
W8A8 = Int8DynamicActivationInt8WeightConfig()


def make(config: Any = INT4, **arguments: Any) -> Any:
    """A model of two layers, prepared."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20))
    quantize_(model, QATConfig(config, **arguments))
    return model


@pytest.mark.parametrize("config", [INT4, W8A8], ids=["weights", "activations"])
def test_gradients_are_those_of_rounding_straight_through(config: Any) -> None:
    """Against float64 autograd of both roundings, where the derivative of each is 1."""
    layer = nn.Linear(64, 48)
    quantize_(layer, QATConfig(config))
    x = gaussian((2, 5, 64), seed=1).requires_grad_()
    by = gaussian((2, 5, 48), seed=2)
    (layer(x) * by).sum().backward()

    deployed = copy.deepcopy(layer)
    quantize_(deployed, QATConfig(config, "convert"))
    weight = layer.weight.memory.detach().double().requires_grad_()  # type: ignore[attr-defined]
    twin = x.detach().double().requires_grad_()
    stored = deployed.weight
    assert isinstance(stored, QTensor)
    rounded_x = twin
    if stored.spec.act is not None:
        rows = quantize_tensor(x.detach().reshape(10, 64), stored.spec.act).dequantize()
        rounded_x = twin + (rows.double().reshape(x.shape) - twin).detach()
    rounded_w = weight + (stored.dequantize().double() - weight).detach()
    assert layer.bias is not None
    bias = layer.bias.detach().double().requires_grad_()
    (F.linear(rounded_x, rounded_w, bias) * by).sum().backward()
    for found, wanted in (
        (x.grad, twin.grad),
        (layer.weight.grad, weight.grad),
        (layer.bias.grad, bias.grad),
    ):
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    # the greatest element of each group learns as the others do, also where integers end below it
    greatest = (
        weight.detach().reshape(48, 2, 32).argmax(-1, keepdim=True) if config is INT4 else None
    )
    if greatest is not None:
        assert bool((layer.weight.grad.reshape(48, 2, 32).gather(-1, greatest) != 0).all())


def test_compiles_once() -> None:
    """One graph for all steps, with the results of eager, and one more when a delay ends."""
    torch._dynamo.reset()
    eager = make(W8A8)
    twin = copy.deepcopy(eager)
    delays = [Delay(model, 2) for model in (eager, twin)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    for step in range(4):
        x = gaussian((6, 64), seed=step)
        found = []
        for model, call in ((eager, eager), (twin, compiled)):
            model.zero_grad()
            out = call(x)
            out.square().sum().backward()
            found.append([out.detach(), *(p.grad for p in model.parameters())])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
        for delay in delays:
            delay.step()
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_checkpoints_are_plain(tmp_path: Path) -> None:
    """A state dict loads into a model that was not prepared, and a prepared one goes on from it."""
    model, x = make(), gaussian((6, 64), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(type(value) is Tensor for value in state.values())
    plain = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20))
    plain.load_state_dict(state)
    quantize_(plain, INT4)
    assert torch.equal(model(x), plain(x))
    other = make()
    other.load_state_dict(state)
    assert torch.equal(model(x), other(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))


def test_other_ways_to_a_gradient() -> None:
    """Activation checkpointing and gradient accumulation give the same as one pass."""
    model, x = make(), gaussian((6, 64), seed=1)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    model.zero_grad()
    for rows in x.split(3):
        model(rows).square().sum().backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def test_nothing_but_codes_is_kept_for_the_backward_pass() -> None:
    """Bytes that autograd holds: the inputs, as in a dense layer, and what is stored of the weight."""

    def kept(layer: Any) -> int:
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            leaves = [t for _, t in tensor.leaves()] if isinstance(tensor, QTensor) else [tensor]
            for leaf in leaves:
                memory = leaf.memory if isinstance(leaf, ComputeWeight) else leaf
                held[memory.data_ptr()] = memory.untyped_storage().nbytes()
            return tensor

        x = gaussian((32, 256), seed=1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return sum(held.values())

    dense = nn.Linear(256, 512)
    prepared = copy.deepcopy(dense)
    quantize_(prepared, QATConfig(INT4))
    stored = copy.deepcopy(prepared)
    quantize_(stored, QATConfig(INT4, "convert"))
    assert isinstance(stored.weight, QTensor)
    codes = sum(leaf.nbytes for _, leaf in stored.weight.leaves())
    assert kept(prepared) <= kept(dense) + codes


def test_a_delay_starts_in_high_precision() -> None:
    model, x = make(), gaussian((6, 64), seed=1)
    rounded, parameters = model(x), list(model.parameters())
    delay = Delay(model, 2)
    dense = F.linear(
        F.relu(F.linear(x, model[0].weight.memory, model[0].bias)),
        model[2].weight.memory,
        model[2].bias,
    )
    assert torch.equal(model(x), dense)
    with pytest.raises(
        ConfigError, match=r"0\.weight: it was never rounded in training, since a Delay"
    ):
        quantize_(model, QATConfig(INT4, "convert"))
    delay.step()
    state = delay.state_dict()
    delay.step()
    assert torch.equal(model(x), rounded)
    delay.load_state_dict(state)
    assert torch.equal(model(x), dense)
    delay.step()
    assert torch.equal(model(x), rounded)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with pytest.raises(ConfigError, match="none of its weights is prepared"):
        Delay(nn.Linear(3, 3), 2)
    with pytest.raises(ConfigError, match="steps=-1"):
        Delay(model, -1)


def test_learned_scales() -> None:
    """They train, the stored weight has them, and scales that went wrong are named."""
    model, x = make(SYMMETRIC, scales="learned"), gaussian((6, 64), seed=1)
    names = [name for name, _ in model.named_parameters()]
    assert "0.weight_scale" in names
    start = model[0].weight_scale.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight_scale, start)
    trained, broken = model(x), copy.deepcopy(model)
    scales = model[0].weight_scale.detach().clone()
    quantize_(model, QATConfig(SYMMETRIC, "convert", "learned"))
    assert torch.equal(model(x), trained)
    stored = model[0].weight.canonical().scale
    assert torch.equal(stored, scales.to(stored.dtype))
    assert "0.weight_scale" not in [name for name, _ in model.named_parameters()]
    broken[2].weight_scale.data[0] = float("nan")
    with pytest.raises(ConfigError, match=r"2\.weight: its learned scales go from nan to nan"):
        quantize_(broken, QATConfig(SYMMETRIC, "convert", "learned"))
    assert isinstance(broken[0].weight, ComputeWeight)


def test_what_is_refused() -> None:
    model, x = make(), gaussian((6, 64), seed=1)
    before = model(x)
    with pytest.raises(ConfigError, match=r"0\.weight: base=.* is not what it was prepared for"):
        quantize_(model, QATConfig(Int4WeightOnlyConfig(64), "convert"))
    assert torch.equal(model(x), before)
    again = quantize_(model, QATConfig(INT4))
    assert {r.reason for r in again.records if r.fqn.endswith("weight")} == {
        "its matmuls are in low precision already"
    }
    with pytest.warns(NothingConvertedWarning, match="set by an earlier conversion already"):
        quantize_(model, QATConfig(W8A8))
    with pytest.warns(NothingConvertedWarning, match="it was not prepared: call quantize_"):
        quantize_(nn.Sequential(nn.Linear(64, 48)), QATConfig(INT4, "convert"))
    with pytest.warns(NothingConvertedWarning, match="that of Own does not"):
        quantize_(Own(64, 48), QATConfig(INT4, scales="learned"))
    for arguments, match in (
        ({"step": "training"}, "step='training'"),
        ({"scales": "random"}, "scales='random'"),
        ({"base": FqnToConfig({"*": INT4})}, "FqnToConfig around QATConfig"),
    ):
        with pytest.raises(ConfigError, match=match):
            QATConfig(**{"base": INT4, **arguments})


class Own(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) * 2


def test_a_forward_of_ones_own_and_the_weight_alone() -> None:
    """Rules that read the weight alone serve any function of it."""
    layer, x = Own(64, 48), gaussian((6, 64), seed=1)
    quantize_(layer, FqnToConfig({"weight": QATConfig(INT4)}))
    weight, expected = layer.weight, layer(x) / 2
    assert torch.equal(x @ weight.t(), expected)
    assert torch.equal(torch.mm(x, weight.t()), expected)
    assert torch.equal(torch.addmm(torch.zeros(48), x, weight.t()), expected)
    with torch.no_grad():
        assert torch.equal(F.linear(x, weight), expected)
    torch.testing.assert_close(torch.einsum("mk,nk->mn", x, weight), expected)


def test_attention() -> None:
    """The joined projection is rounded, by kernels that torch chooses otherwise for trained weights."""
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    x, twin = gaussian((2, 5, 64), seed=1), copy.deepcopy(model)
    quantize_(twin, INT4)
    quantize_(model, QATConfig(INT4))
    out = model(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(out, twin(x, x, x, need_weights=False)[0])
    out.sum().backward()
    assert model.in_proj_weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, x, x, need_weights=False)[0], out)
