"""Offloading and GaLore: optimizers around another one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ao_optim
from ao_core import QTensor
from ao_core.testing.base import gaussian, same_bits

SHAPES = ((70, 65), (65,), ())


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, ao_optim.Lion8bit])
def test_offload_equals_the_inner_optimizer(inner, make_params, run_steps):
    """With a scheduler, clipping and two backward passes a step."""
    ends = []
    for offload in (False, True):
        params = make_params(*SHAPES)
        options = {"lr": 0.1, "weight_decay": 0.01}
        made = (
            ao_optim.CPUOffloadOptimizer(params, inner, **options)
            if offload
            else inner(params, **options)
        )
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)
        for _ in range(5):
            made.zero_grad()
            for target in (0.5, 1.0):
                torch.stack([(p - target).square().sum() for p in params]).sum().backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            made.step()
            schedule.step()
        ends.append(params)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(*ends, strict=True))


def test_offload_sends_gradients_during_backward(make_params, monkeypatch):
    """Once, if nobody touches them afterwards; what is changed or set by hand is sent at the step."""
    (param,) = make_params((70, 65))
    optimizer = ao_optim.CPUOffloadOptimizer([param], torch.optim.SGD, lr=1.0)
    sent = []
    real = optimizer._send
    monkeypatch.setattr(optimizer, "_send", lambda p: (sent.append(p), real(p)))
    param.sum().backward()
    assert optimizer._sent[param][0] is param.grad, "the hook was registered with the class' own"
    before = param.detach().clone()
    optimizer.step()
    assert len(sent) == 0
    torch.testing.assert_close(param.detach(), before - 1)
    optimizer.zero_grad()
    param.sum().backward()
    param.grad.mul_(0.5)
    optimizer.step()
    assert len(sent) == 1
    torch.testing.assert_close(param.detach(), before - 1.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert len(sent) == 2
    torch.testing.assert_close(param.detach(), before - 2.5)


def test_offload_sees_parameters_that_change(make_params, run_steps):
    (param,) = make_params((70, 65))
    optimizer = ao_optim.CPUOffloadOptimizer([param], torch.optim.SGD, lr=1.0)
    with torch.no_grad():
        param.zero_()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param, -torch.ones_like(param))


def test_offload_shows_the_state(make_params, run_steps):
    params = make_params(*SHAPES)
    optimizer = ao_optim.CPUOffloadOptimizer(params, ao_optim.AdamW8bit)
    run_steps(optimizer, params, 1)
    assert isinstance(optimizer.state[params[0]]["exp_avg"], QTensor)
    direct = ao_optim.AdamW8bit(make_params(*SHAPES))
    direct.load_state_dict(optimizer.state_dict())
    other = ao_optim.CPUOffloadOptimizer(make_params(*SHAPES), ao_optim.AdamW8bit)
    other.load_state_dict(direct.state_dict())
    assert torch.equal(
        other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_offload_counts_skipped_steps(make_params):
    (param,) = make_params((70, 65))
    optimizer = ao_optim.CPUOffloadOptimizer([param], skip_nonfinite=True)
    before = param.detach().clone()
    param.grad = torch.full_like(param, float("inf"))
    optimizer.step()
    assert optimizer.param_groups[0]["skipped_steps"] == 1
    assert same_bits(param.detach(), before)


@pytest.mark.parametrize("shape", [(30, 90), (90, 30)], ids=["wide", "tall"])
def test_galore_of_low_rank_gradients_is_the_inner_optimizer(shape, make_params):
    """Where gradients have the rank that is kept, SGD on the projection is SGD."""
    left, right = gaussian((shape[0], 4), seed=1), gaussian((4, shape[1]), seed=2)
    (ours,), (full,) = make_params(shape), make_params(shape)
    options = {"lr": 0.1, "weight_decay": 0.0}
    galore = ao_optim.GaLore([ours], ao_optim.SGD8bit, rank=4, scale=1.0, **options)
    plain = torch.optim.SGD([full], momentum=0.9, **options)
    for step in range(1, 4):
        for p, optimizer in ((ours, galore), (full, plain)):
            p.grad = step * left @ right
            optimizer.step()
    torch.testing.assert_close(ours, full, rtol=1e-4, atol=1e-4)
    kept = galore.state[ours]
    assert kept["galore_projection"].shape == (30, 4)
    assert kept["momentum_buffer"].numel() == 4 * 90


def test_galore_decays_whole_weights(make_params):
    (param,) = make_params((30, 90))
    before = param.detach().clone()
    optimizer = ao_optim.GaLore([param], lr=0.5, weight_decay=0.1, rank=4)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), before * 0.95)


def test_galore_options(make_params):
    with pytest.raises(ValueError, match="rank=0"):
        ao_optim.GaLore(make_params((30, 90)), rank=0)
    optimizer = ao_optim.GaLore(make_params((30, 90)), torch.optim.AdamW, lr=0.1, rank=4)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(40, 50))], "rank": 8})
    assert [group["rank"] for group in optimizer.param_groups] == [4, 8]
    assert "rank" not in optimizer.inner.param_groups[1]
