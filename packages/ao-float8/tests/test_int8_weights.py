"""Weights that are int8 and trained, in programs of torch: its optimizers, averages and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from ao_core import QTensor, dequantize_, quantize_
from ao_core.ext import UnsupportedOp, stochastic_rounding

OPTIMIZERS = (
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("Adam", {"fused": True, "amsgrad": True}),
    ("SGD", {"fused": True, "momentum": 0.9}),
    ("SGD", {"foreach": True}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"momentum": 0.9}),
    ("Adadelta", {}),
    ("NAdam", {}),
    ("Adafactor", {}),
)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
    quantize_(model, "int8_weight_only_training")
    return model


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def values(model: nn.Module) -> list[Tensor]:
    found = [p.detach() for p in model.parameters()]
    return [p.dequantize() if isinstance(p, QTensor) else p.clone() for p in found]


def backward(model: nn.Module) -> None:
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()


def dequantized(model: nn.Module) -> nn.Module:
    dense = copy.deepcopy(model)
    dequantize_(dense)
    for parameter in dense.parameters():
        parameter.requires_grad_()
    return dense


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_optimizers_of_torch(name: str, options: dict[str, Any]) -> None:
    """The first step is that of the same values in float32, but for rounding once or twice."""
    model, make_one = make(), getattr(torch.optim, name)
    dense = dequantized(model)
    for each in (model, dense):
        optimizer = make_one(each.parameters(), lr=0.05, **options)
        backward(each)
        with stochastic_rounding(generator()):
            optimizer.step()
    for found, expected in zip(values(model), values(dense), strict=True):
        step = expected.abs().amax() / 127 if expected.dim() == 2 else 1e-5
        assert float((found - expected).abs().max()) <= 2.02 * float(step)


@pytest.mark.parametrize("make_one", [torch.optim.AdamW, torch.optim.SGD])
def test_state_is_made_for_a_distributed_checkpoint(make_one: Callable[..., Any]) -> None:
    """torch lets a fresh optimizer step at a learning rate of 0, which leaves the weights alone."""
    model, other = make(), make()
    before = values(model)
    optimizer = make_one(model.parameters(), lr=0.05)
    get_state_dict(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    backward(model)
    with stochastic_rounding(generator()):
        optimizer.step()
    saved = get_state_dict(model, optimizer)
    resumed = make_one(other.parameters(), lr=0.05)
    set_state_dict(
        other, resumed, model_state_dict=saved[0], optim_state_dict=copy.deepcopy(saved[1])
    )
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(other), strict=True))


@pytest.mark.parametrize("how", ["multi_avg_fn", "avg_fn"])
def test_a_dense_average(how: str) -> None:
    model = make()
    fn = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "avg_fn": get_ema_avg_fn(0.9)}[how]
    average = AveragedModel(model, **{how: fn})
    dequantize_(average.module)
    average.update_parameters(model)
    first = values(model)
    backward(model)
    with stochastic_rounding(generator()):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    average.update_parameters(model)
    for found, old, new in zip(values(average), first, values(model), strict=True):
        torch.testing.assert_close(found, old.lerp(new, 0.1))


def test_an_average_in_int8_wants_a_generator() -> None:
    model = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    backward(model)
    with stochastic_rounding(generator()):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    with pytest.raises(UnsupportedOp, match=r"update_parameters .* dequantize_\(average.module\)"):
        average.update_parameters(model)
    before = values(average)
    with stochastic_rounding(generator()):
        average.update_parameters(model)
    assert not torch.equal(values(average)[0], before[0])
