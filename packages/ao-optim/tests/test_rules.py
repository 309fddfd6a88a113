"""Update rules against torch's optimizers, and against their formulas in float64 where torch has none."""

from __future__ import annotations

import math

import pytest
import torch

import ao_optim
from ao_optim import rules

SHAPES = ((37, 23), (11,), ())

WITH_TORCH = [
    (ao_optim.AdamW8bit, torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    (ao_optim.AdamW8bit, torch.optim.AdamW, {"maximize": True}),
    (ao_optim.Adam8bit, torch.optim.Adam, {"weight_decay": 0.1}),
    (ao_optim.SGD8bit, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (ao_optim.SGD8bit, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (ao_optim.SGD8bit, torch.optim.SGD, {"momentum": 0.0}),
    (ao_optim.RMSprop8bit, torch.optim.RMSprop, {"weight_decay": 0.1}),
    (ao_optim.RMSprop8bit, torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (ao_optim.Adagrad8bit, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    (ao_optim.Muon8bit, torch.optim.Muon, {"nesterov": False}),
    (ao_optim.Muon8bit, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "options"), WITH_TORCH)
def test_equals_torch(ours, theirs, options, capturable, make_params, run_steps):
    """With float32 state; `capturable` computes with tensors in place of numbers."""
    shapes = SHAPES[:1] if ours is ao_optim.Muon8bit else SHAPES
    mine, other = make_params(*shapes), make_params(*shapes)
    lr = torch.tensor(0.01) if capturable else 0.01
    optimizer = ours(mine, lr=lr, state_format="float32", capturable=capturable, **options)
    run_steps(optimizer, mine, 10)
    run_steps(theirs(other, lr=0.01, **options), other, 10)
    # Newton-Schulz runs in bfloat16, whose products both round in their own order
    tolerance = 2e-3 if ours is ao_optim.Muon8bit else 5e-6
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def _lion(p, g, s, o, t):
    c = 0.9 * s["exp_avg"] + 0.1 * g
    s["exp_avg"] = 0.99 * s["exp_avg"] + 0.01 * g
    return p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * c.sign()


def _ademamix(p, g, s, o, t):
    share = min(t / o["t_beta3"], 1.0)
    low, high = math.log(0.9), math.log(0.9999)
    beta3 = min(math.exp(low * high / ((1 - share) * high + share * low)), 0.9999)
    s["exp_avg"] = 0.9 * s["exp_avg"] + 0.1 * g
    s["exp_avg_slow"] = beta3 * s["exp_avg_slow"] + (1 - beta3) * g
    s["exp_avg_sq"] = 0.999 * s["exp_avg_sq"] + 0.001 * g * g
    alpha = 5.0 * min(t / o["t_alpha"], 1.0)
    mixed = s["exp_avg"] / (1 - 0.9**t) + alpha * s["exp_avg_slow"]
    spread = (s["exp_avg_sq"] / (1 - 0.999**t)).sqrt() + o["eps"]
    return p - o["lr"] * (mixed / spread + o["weight_decay"] * p)


def _lamb(p, g, s, o, t):
    s["exp_avg"] = 0.9 * s["exp_avg"] + 0.1 * g
    s["exp_avg_sq"] = 0.999 * s["exp_avg_sq"] + 0.001 * g * g
    spread = (s["exp_avg_sq"] / (1 - 0.999**t)).sqrt() + o["eps"]
    change = s["exp_avg"] / (1 - 0.9**t) / spread + o["weight_decay"] * p
    return p - o["lr"] * p.norm() / change.norm() * change


FORMULAS = [
    (rules.LION, _lion, {"weight_decay": 0.1}),
    (rules.ADEMAMIX, _ademamix, {"t_alpha": 7, "t_beta3": 7}),
    (rules.LAMB, _lamb, {}),
]


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    ("rule", "formula", "options"), FORMULAS, ids=lambda v: getattr(v, "name", "")
)
def test_equals_its_formula(rule, formula, options, tensors, make_params, give_grads):
    (param,) = make_params((37, 23))
    options = {**rule.defaults, "lr": 0.01, **options}
    value = param.detach().clone()
    exact = value.double()
    state = {slot.name: torch.zeros_like(value) for slot in rule.slots(options)}
    wide = {name: moment.double() for name, moment in state.items()}
    for step in range(1, 11):
        give_grads([param], step)
        count = torch.tensor(float(step)) if tensors else step
        rule.update(value, param.grad.clone(), state, options, count)
        exact = formula(exact, param.grad.double(), wide, options, step)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    for name, moment in state.items():
        torch.testing.assert_close(moment.double(), wide[name], rtol=1e-5, atol=1e-6)


def test_lamb_of_zeros_moves():
    """A parameter of 0 has no length to follow: the ratio is 1."""
    param = torch.nn.Parameter(torch.zeros(4, 3))
    param.grad = torch.ones(4, 3)
    ao_optim.LAMB8bit([param], lr=0.5).step()
    torch.testing.assert_close(param.detach(), torch.full((4, 3), -0.5))
