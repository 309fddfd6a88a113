"""What is refused, what is skipped, and steps that are compiled."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import ao_optim
from ao_core.ext import UnknownNameError
from ao_core.testing.base import same_bits

BAD = [
    ("AdamW8bit", {"lr": -1.0}, "Invalid learning rate: -1.0"),
    ("AdamW8bit", {"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
    ("AdamW8bit", {"lr": float("nan")}, "Invalid learning rate: nan"),
    ("AdamW8bit", {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    ("AdamW8bit", {"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ("AdamW8bit", {"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ("SGD8bit", {"momentum": -0.1}, "Invalid momentum value: -0.1"),
    ("SGD8bit", {"nesterov": True, "dampening": 0.5}, "Nesterov momentum requires"),
    ("AdEMAMix8bit", {"betas": (0.9, 0.99)}, "3 numbers"),
    ("Muon8bit", {"adjust_lr_fn": "none"}, "none is not supported"),
    ("AdamW8bit", {"rounding": "up"}, "nearest, stochastic, kahan"),
    ("AdamW8bit", {"rounding": "stochastic", "capturable": True}, "no graph"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_options(name, options, message, make_params):
    """Of the optimizer, and of a group that is added: nothing is added then."""
    cls = getattr(ao_optim, name)
    with pytest.raises(ValueError, match=message):
        cls(make_params((5, 3)), **options)
    optimizer = cls(make_params((5, 3)))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": make_params((5, 3)), **options})
    assert len(optimizer.param_groups) == 1


def test_unknown_options_and_formats(make_params):
    with pytest.raises(TypeError, match="Lion8bit has no option eps; it has lr, betas"):
        ao_optim.Lion8bit(make_params((5, 3)), eps=1.0)
    with pytest.raises(UnknownNameError, match="dynamic8"):
        ao_optim.Lion8bit(make_params((5, 3)), state_format="dynamic")
    names = list(inspect.signature(ao_optim.Lion8bit).parameters)
    assert names[:4] == ["params", "lr", "betas", "weight_decay"]


@pytest.mark.parametrize(
    ("param", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.complex64), {}, "not torch.complex64"),
        (torch.zeros(3, dtype=torch.float16), {"rounding": "stochastic"}, "use 'kahan'"),
    ],
)
def test_bad_parameters(param, options, message):
    with pytest.raises(ValueError, match=message):
        ao_optim.AdamW8bit([nn.Parameter(param)], **options)


def test_muon_is_for_matrices(make_params):
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        ao_optim.Muon8bit(make_params((5, 3), (3,)))


def test_gradients_that_are_not_finite(make_params, run_steps):
    """They spread to the block that shares a scale, or, if asked, the step is left out and counted."""
    for skip in (False, True):
        params = make_params((70, 65), (9,))
        optimizer = ao_optim.AdamW8bit(params, skip_nonfinite=skip)
        run_steps(optimizer, params, 1)
        before = [p.detach().clone() for p in params]
        params[0].grad[3, 5] = float("nan")
        optimizer.step()
        run_steps(optimizer, params, 1, first=2)
        bad = int((~torch.isfinite(params[0])).sum())
        assert bad == (0 if skip else 256)
        assert bool(torch.isfinite(params[1]).all())
        assert optimizer.skipped_steps == optimizer.state_dict()["param_groups"][0].get(
            "skipped_steps", 0
        )
        assert optimizer.skipped_steps == skip
        assert not same_bits(params[1].detach(), before[1])


def test_two_dtypes_and_groups(make_params, run_steps):
    """One optimizer over several dtypes and options gives what one for each gives."""
    halves, fulls = make_params((70, 65), dtype=torch.bfloat16), make_params((65, 70))
    both = ao_optim.AdamW8bit(
        [{"params": halves, "lr": 0.5}, {"params": fulls, "state_format": "rank1_4bit"}]
    )
    alone = [make_params((70, 65), dtype=torch.bfloat16), make_params((65, 70))]
    optimizers = [ao_optim.AdamW8bit(alone[0], lr=0.5), ao_optim.AdamW4bit(alone[1])]
    for step in range(3):
        for params in (halves, fulls, *alone):
            for p in params:
                p.grad = torch.full_like(p, 1.0 + step)
        for optimizer in (both, *optimizers):
            optimizer.step()
    assert same_bits(halves[0].detach(), alone[0][0].detach())
    assert same_bits(fulls[0].detach(), alone[1][0].detach())


@pytest.mark.slow
def test_compiled_training_step():
    """A compiled step of training, optimizer and all, gives the bits of the same in eager mode."""
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 65), nn.Tanh(), nn.Linear(65, 1))
        optimizer = ao_optim.AdamW8bit(model.parameters(), lr=0.01)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            found = loss.detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return found

        run = torch.compile(step, backend="aot_eager") if compiled else step
        losses = [run(torch.full((8, 70), 0.1 * i)) for i in range(4)]
        assert losses[-1] < losses[1]
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_report(make_params, run_steps):
    params = make_params((128, 64), (64,))
    optimizer = ao_optim.AdamW8bit([{"params": params[:1]}, {"params": params[1:]}])
    run_steps(optimizer, params, 1)
    report = ao_optim.state_report(optimizer)
    first, second = report.groups
    assert (first.quantized, second.quantized) == (8192, 0)
    # codes, a scale for 256, and the count of steps
    assert first.state_bytes == 2 * (8192 + 4 * 32) + 4
    assert second.state_bytes == 8 * 64 + 4
    assert '"adamw_bytes": 66048' in report.to_json()
    assert "AdamW8bit" in str(report)
    full = torch.optim.AdamW(params)
    run_steps(full, params, 1)
    assert ao_optim.state_report(full).total.state_bytes == 8 * 8256 + 2 * 4
