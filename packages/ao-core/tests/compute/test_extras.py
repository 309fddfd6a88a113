"""Extra tensors of a `ComputeWeight`: a learned scale, its gradients, and all that must know parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ao_core
from ao_core import ComputeWeight, Config, QTensor, Spec, Target, Transform, explain, quantize_
from ao_core.compute import (
    FakeQuantize,
    Matmuls,
    extra_tensors,
    fake_quantized,
    register_fake_quantize,
)
from ao_core.compute.fake_linear import FakeQuantizedLinear
from ao_core.compute.fake_quantize import _rules
from ao_core.errors import ConfigError, UnknownNameError, UnsupportedOp
from ao_core.outcome import NothingConvertedWarning
from ao_core.recipes import WeightOnlyConfig
from ao_core.registry import registry
from ao_core.spec import ROW
from ao_core.tensor import quantize_tensor
from ao_core.tensor.saving import load_model, save_model
from ao_core.testing.base import gaussian

INT4 = Spec("int4", ROW, layout="plain")


@dataclass(frozen=True)
class LearnedScales(Config):
    """Train with a learned scale for each row."""

    rule: str = "learned_scale"
    act: bool = False
    block: int = -1
    dtype: str = "int4"
    scale_dtype: str = "float32"


def _apply(weight: Tensor, config: LearnedScales, target: Target) -> Tensor:
    spec = Spec(config.dtype, (1, config.block), scale_dtype=config.scale_dtype)
    act = Spec("int8", ROW) if config.act else None
    return ComputeWeight(weight, *fake_quantized(spec, config.rule, act))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    ao_core.register(Transform(LearnedScales, "learned_scales", 1, _apply))
    yield
    registry.transforms._records.pop("learned_scales")
    registry.transforms._providers.pop("learned_scales")
    registry._transform_of.pop(LearnedScales)


def make(n: int = 5, k: int = 7, config: LearnedScales | None = None, bias: bool = True) -> Any:
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(gaussian((n, k), seed=1))
        if bias:
            layer.bias.copy_(gaussian((n,), seed=2))
    report = quantize_(layer, config or LearnedScales())
    assert [r.fqn for r in report.with_status("changed")] == ["weight"]
    return layer


def test_an_optimizer_learns_it() -> None:
    """The error of the layer's output falls below that of the best start, with the weight frozen."""
    layer = make(16, 32, bias=False)
    x = gaussian((64, 32), seed=3)
    target = F.linear(x, layer.weight.memory.detach().clone())
    assert dict(layer.named_parameters()).keys() == {"weight", "weight_scale"}
    optimizer = torch.optim.Adam([layer.weight_scale], lr=2e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.85 * losses[0]


def test_copies() -> None:
    layer, x = make(), gaussian((4, 7), seed=3)
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    other.weight_scale.data.mul_(2)
    assert not torch.equal(other(x), layer(x))
    assert extra_tensors(other)["scale"] is other.weight_scale
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.weight_scale.dtype == half.weight.dtype == torch.bfloat16
    assert half(x.bfloat16()).dtype == torch.bfloat16
    empty = copy.deepcopy(layer).to_empty(device="meta")
    assert empty(x.to("meta")).shape == (4, 5)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict(assign: bool, tmp_path: Path) -> None:
    layer, x = make(), gaussian((4, 7), seed=3)
    layer.weight_scale.data.mul_(1.2)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(
        ("weight", "weight_scale", "bias"), Tensor
    )
    other = make()
    other.weight.data.zero_()
    other.load_state_dict(state, assign=assign)
    assert isinstance(other.weight, ComputeWeight)
    assert torch.equal(other(x), layer(x))


def test_save_model(tmp_path: Path) -> None:
    layer, x = make(), gaussian((4, 7), seed=3)
    layer.weight_scale.data.mul_(1.2)
    save_model(layer, tmp_path / "model")
    other = make()
    other.weight.data.zero_()
    load_model(other, tmp_path / "model")
    assert torch.equal(other(x), layer(x))
    whole = tmp_path / "whole.pt"
    torch.save(layer, whole)
    assert torch.equal(torch.load(whole, weights_only=False)(x), layer(x))


@pytest.mark.parametrize("act", [False, True], ids=["weight", "activations"])
def test_compiles(act: bool) -> None:
    """One graph, with the results of eager, and no second compilation."""
    layer = make(config=LearnedScales(act=act))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=counter)
    for seed in (3, 4):
        found = []
        for each in (layer, compiled):
            x = gaussian((4, 7), seed=seed).requires_grad_()
            each.zero_grad()
            out = each(x)
            out.square().sum().backward()
            found.append([out.detach(), x.grad, *(p.grad for p in each.parameters())])
            with torch.no_grad():
                each.get_parameter("weight_scale").mul_(1.05)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_quantizing_afterwards_takes_the_extras_away() -> None:
    layer = make()
    scale = layer.weight_scale.detach().clone()
    assert type(layer) is FakeQuantizedLinear
    quantize_(layer, WeightOnlyConfig("int8"))
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, QTensor)
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
    assert extra_tensors(layer) == {}
    assert scale.shape == (5, 1)


def test_back_in_high_precision() -> None:
    """The optimizer's parameters stay; the scale is not read, and comes back with the matmuls."""
    layer, x = make(), gaussian((4, 7), seed=3)
    rounded, matmuls = layer(x), layer.weight.matmuls
    layer.weight.matmuls = Matmuls()
    assert torch.equal(layer(x), F.linear(x, layer.weight.memory, layer.bias))
    layer.weight.matmuls = matmuls
    assert torch.equal(layer(x), rounded)


def test_tied_layers_share_them() -> None:
    first, second, lookup = nn.Linear(7, 5), nn.Linear(7, 5), nn.Embedding(5, 7)
    second.weight = lookup.weight = first.weight
    model = nn.ModuleList([lookup, first, second])
    quantize_(model, LearnedScales())
    assert first.weight_scale is second.weight_scale
    assert not hasattr(lookup, "weight_scale")
    assert torch.equal(lookup(torch.tensor([2])), first.weight.memory[2:3])


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) * 2


@pytest.mark.parametrize(
    ("module", "config", "reason"),
    [
        (Own(7, 5), LearnedScales(), "that of Own does not"),
        (nn.MultiheadAttention(8, 2), LearnedScales(), "that of MultiheadAttention does not"),
        (
            nn.Linear(7, 5),
            LearnedScales(dtype="nf4", scale_dtype="e4m3"),
            "it learns one plain scale per block",
        ),
    ],
    ids=["own forward", "attention", "quantized scales"],
)
def test_what_cannot_is_skipped_with_a_reason(
    module: nn.Module, config: LearnedScales, reason: str
) -> None:
    with pytest.warns(NothingConvertedWarning):
        report = quantize_(module, config)
    assert any(reason in record.reason for record in report.with_status("skipped"))
    assert not any(isinstance(m, FakeQuantizedLinear) for m in module.modules())


def test_a_taken_name_is_skipped_with_a_reason() -> None:
    layer = nn.Linear(7, 5)
    layer.weight_scale = nn.Parameter(torch.ones(5, 1))
    with pytest.warns(NothingConvertedWarning, match="'weight_scale' already"):
        quantize_(layer, LearnedScales())
    assert type(layer) is nn.Linear
    assert layer.weight_scale.min() == 1


def test_what_fails_leaves_the_module_as_it_was() -> None:
    """Also where it was made a `FakeQuantizedLinear` already."""

    class Guarded(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "weight" and isinstance(value, QTensor):
                raise RuntimeError("in the middle")
            super().__setattr__(name, value)

    layer, last = make(), Guarded(7, 5)
    scale = layer.weight_scale
    model = nn.Sequential(layer, last)
    with pytest.raises(RuntimeError, match="in the middle"):
        quantize_(model, WeightOnlyConfig("int8"), strict=True)
    assert type(layer) is FakeQuantizedLinear
    assert layer.weight_scale is scale
    fresh = nn.Sequential(nn.Linear(7, 5), Guarded(7, 5))
    config = ao_core.FqnToConfig({"0": LearnedScales(), "1": WeightOnlyConfig("int8")})
    with pytest.raises(RuntimeError, match="in the middle"):
        quantize_(fresh, config, strict=True)
    assert type(fresh[0]) is nn.Linear
    assert dict(fresh[0].named_parameters()).keys() == {"weight", "bias"}


def test_the_weight_outside_of_its_module_is_refused() -> None:
    layer = make()
    for call in (F.linear, lambda x, w: x @ w.t()):
        with pytest.raises(UnsupportedOp, match="call the module"):
            call(gaussian((4, 7)), layer.weight)


def test_what_is_printed_and_explained() -> None:
    layer = make()
    assert "int4[1×*] by learned_scale" in layer.weight.matmuls.text()
    assert repr(layer).startswith("FakeQuantizedLinear(in_features=7")
    (weight,) = explain(layer)
    assert weight.note == (
        "output: the matmul of the weight as the rule 'learned_scale' rounds it; "
        "in high precision: grad_input, grad_weight, of rounded operands"
    )
    assert not weight.calls


def test_unknown_and_double_rules() -> None:
    with pytest.raises(UnknownNameError, match="learned_scale"):
        fake_quantized(INT4, "learned_scales")
    rule = FakeQuantize(
        "learned_scale", lambda values, spec: {}, lambda values, spec, extras: values
    )
    with pytest.raises(ConfigError, match="another fake-quantize rule"):
        register_fake_quantize(rule)


def test_a_rule_of_ones_own() -> None:
    """An adapter that is added before rounding (LoRA of quantized training), and rounding offsets."""

    def initial(values: Tensor, spec: Spec) -> dict[str, Tensor]:
        n, k = values.shape
        return {"a": gaussian((2, k), seed=9) / 4, "b": torch.zeros(n, 2)}

    def apply(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
        merged = values + extras["b"] @ extras["a"]
        return merged + (quantize_tensor(merged.detach(), spec).dequantize() - merged).detach()

    register_fake_quantize(FakeQuantize("merged", initial, apply))
    try:
        layer = make(config=LearnedScales("merged"))
        x = gaussian((4, 7), seed=3)
        layer.weight_b.data.copy_(gaussian((5, 2), seed=8))
        out = layer(x)
        out.sum().backward()
        by = torch.ones(5, 4) @ x
        torch.testing.assert_close(layer.weight_b.grad, by @ layer.weight_a.detach().t())
        torch.testing.assert_close(layer.weight_a.grad, layer.weight_b.detach().t() @ by)
        torch.testing.assert_close(layer.weight.grad, by)
    finally:
        _rules.pop("merged")


def test_other_ways_to_a_gradient() -> None:
    """Activation checkpointing and `torch.func.grad` give the same, bit for bit."""
    layer, x = make(), gaussian((4, 7), seed=3)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    named = dict(layer.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, values, (x,)).square().sum()

    others = torch.func.grad(loss)(named)
    for (name, parameter), grad in zip(named.items(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)
        assert torch.equal(others[name], grad)
