"""Every optimizer over weights that are int8 and trained, without a copy in high precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ao_optim
from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import STOCHASTIC, stochastic_rounding
from ao_optim import CPUOffloadOptimizer, GaLore, LowBitOptimizer, optimizers

NAMES = optimizers.__all__
SPEC = Spec("int8", (1, -1), options=(STOCHASTIC,))


def weight() -> nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(quantize_tensor(torch.randn(64, 96, generator=generator), SPEC))


def steps(name: str, *, count: int = 4, **options: object) -> tuple[nn.Parameter, LowBitOptimizer]:
    param = weight()
    optimizer = getattr(ao_optim, name)([param], lr=0.05, **options)
    take(param, optimizer, count)
    return param, optimizer


def take(param: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        param.grad = param.detach().dequantize()
        optimizer.step()


def values(param: Tensor) -> Tensor:
    held = param.detach()
    assert isinstance(held, QTensor)
    return held.dequantize()


@pytest.mark.parametrize("name", NAMES)
def test_it_steps_as_over_float32(name: str) -> None:
    param, _ = steps(name)
    dense = nn.Parameter(values(weight()).clone())
    other = getattr(ao_optim, name)([dense], lr=0.05)
    for _ in range(4):
        dense.grad = dense.detach().clone()
        other.step()
    change, expected = values(param) - values(weight()), dense.detach() - values(weight())
    # each step rounds to a step of int8, and optimizers that look at signs alone follow it
    assert float((change - expected).norm() / expected.norm()) < 0.35
    assert float((change - expected).mean()) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_noise_follows_the_seed(name: str) -> None:
    first, again, other = steps(name)[0], steps(name)[0], steps(name, seed=7)[0]
    assert torch.equal(values(first), values(again))
    assert not torch.equal(values(first), values(other))


def test_the_generator_of_the_user_draws_where_there_is_one() -> None:
    made = []
    for seed in (0, 0, 1):
        with stochastic_rounding(torch.Generator().manual_seed(seed)):
            made.append(values(steps("AdamW8bit")[0]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_resuming_is_bit_equal() -> None:
    param, optimizer = steps("AdamW8bit")
    saved = copy.deepcopy((param.detach(), optimizer.state_dict()))
    take(param, optimizer, 3)
    resumed = nn.Parameter(saved[0])
    other = ao_optim.AdamW8bit([resumed], lr=0.05)
    other.load_state_dict(saved[1])
    take(resumed, other, 3)
    assert torch.equal(values(param), values(resumed))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_length_zero_changes_nothing(name: str) -> None:
    """So `torch.distributed.checkpoint` makes the state of a fresh optimizer."""
    param = weight()
    before = values(param).clone()
    optimizer = getattr(ao_optim, name)([param], lr=0.0)
    take(param, optimizer, 1)
    assert torch.equal(values(param), before)


def test_updates_below_a_step_add_up() -> None:
    """A step of int8 is some hundred times as long as each update."""
    param = nn.Parameter(quantize_tensor(torch.ones(64, 64) * torch.linspace(0.1, 1, 64), SPEC))
    before = values(param)
    optimizer = ao_optim.SGD8bit([param], lr=1e-4, momentum=0.0)
    for _ in range(100):
        param.grad = torch.ones(64, 64)
        optimizer.step()
    assert float((values(param) - before).mean()) == pytest.approx(-0.01, rel=0.1)


def test_others_of_the_group_go_on() -> None:
    param, bias = weight(), nn.Parameter(torch.ones(96))
    alone = nn.Parameter(torch.ones(96))
    both, one = ao_optim.AdamW8bit([param, bias]), ao_optim.AdamW8bit([alone])
    for each in (param, bias, alone):
        each.grad = torch.ones(each.shape)
    both.step()
    one.step()
    assert torch.equal(bias, alone)


@pytest.mark.parametrize("wrapper", [CPUOffloadOptimizer, GaLore])
def test_wrapped(wrapper: type[torch.optim.Optimizer]) -> None:
    param = weight()
    before = values(param).clone()
    optimizer = wrapper([param], ao_optim.AdamW8bit, lr=0.05)
    with stochastic_rounding(torch.Generator().manual_seed(0)):
        take(param, optimizer, 2)
    assert not torch.equal(values(param), before)


def test_what_cannot_be_trained_is_refused_at_once() -> None:
    nearest = nn.Parameter(quantize_tensor(torch.randn(8, 8), Spec("int8", (1, -1))))
    with pytest.raises(ValueError, match="int8_weight_only_training"):
        ao_optim.AdamW8bit([nearest])
    ao_optim.AdamW8bit([nearest.requires_grad_(False)])
    with pytest.raises(ValueError, match="rounding='kahan'"):
        ao_optim.AdamW8bit([weight()], rounding="kahan")
