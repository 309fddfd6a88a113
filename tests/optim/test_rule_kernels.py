"""The CPU kernel of `rule_step` under the optimizers of ao-optim: it does what torch operations do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ao_optim
from ao_core import QTensor, kernels
from ao_core.ext.kernels import select
from ao_core.testing import KernelSuite
from ao_optim import StepCall, apply, rules

SHAPES = ((130, 66), (65, 3, 27), (5000,), (3,), (0, 8))


class TestRuleStep(KernelSuite):
    kernel = "cpu_rule_step"


def make_params(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def train(optimizer, params, steps=3):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = (0.1 * grad + 0.01).to(param.dtype)
        optimizer.step()


def watch(monkeypatch):
    """The calls that are made, and the kernels that serve them."""
    calls, real = [], apply.run_kernel

    def watched(call, *args, **kwargs):
        calls.append((call, select(call).name))
        return real(call, *args, **kwargs)

    monkeypatch.setattr(apply, "run_kernel", watched)
    return calls


def ends(name, dtype=torch.float32, shapes=SHAPES, **options):
    """Parameters and moments after some steps, by the kernel and by torch operations."""
    found = []
    for band in (None, "reference"):
        params = make_params(dtype, shapes)
        optimizer = getattr(ao_optim, name)(params, lr=1e-2, **options)
        if band is None:
            train(optimizer, params)
        else:
            with kernels(band):
                train(optimizer, params)
        found.append((params, [optimizer.state[param] for param in params]))
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW4bit", {}),
        ("Adam4bit", {"weight_decay": 0.1, "maximize": True}),
        ("SGD8bit", {"nesterov": True, "weight_decay": 0.1}),
        ("SGD8bit", {"momentum": 0.0}),
        ("SGD8bit", {"state_format": "rank1_4bit"}),
        ("RMSprop8bit", {"state_format": "dynamic8", "centered": True, "momentum": 0.9}),
        ("Adagrad8bit", {"state_format": "rank1_4bit"}),
        ("AdEMAMix8bit", {"state_format": "dynamic8"}),
        ("Lion8bit", {"state_format": "bfloat16"}),
        ("LAMB8bit", {"state_format": "dynamic8"}),
        ("LAMB8bit", {"state_format": "rank1_4bit"}),
        ("AdamW8bit", {"state_format": "dynamic8", "rounding": "kahan", "dtype": torch.float16}),
        ("AdamW4bit", {"rounding": "kahan", "dtype": torch.bfloat16}),
        ("AdamW8bit", {"state_format": "float32", "rounding": "nearest", "dtype": torch.bfloat16}),
    ],
)
def test_steps_are_those_of_torch_operations(name, options, monkeypatch):
    """Numbers next to a midpoint may have the other code, and few do where codes are looked up."""
    calls = watch(monkeypatch)
    (params, states), (expected, of_expected) = ends(name, **options)
    assert "cpu_rule_step" in {kernel for _, kernel in calls}
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[params[0].dtype]
    for param, other, state, wanted in zip(params, expected, states, of_expected, strict=True):
        far = (param - other).abs() > 4 * step * (1 + other.abs())
        assert far.float().sum() <= 5e-3 * far.numel()
        for key, moment in state.items():
            if isinstance(moment, QTensor):
                codes = moment.parts["qdata"], wanted[key].parts["qdata"]
                assert (codes[0] != codes[1]).float().sum() <= 1e-2 * codes[0].numel()
                for part in set(moment.parts) - {"qdata"}:
                    torch.testing.assert_close(
                        moment.parts[part], wanted[key].parts[part], rtol=1e-4, atol=1e-12
                    )
            elif key == "compensation":
                off = (param.double() + moment - other.double() - wanted[key]).abs()
                assert (off > 1e-3).sum() <= 5e-3 * off.numel()
            else:
                torch.testing.assert_close(moment, wanted[key], rtol=2**-7, atol=1e-7)


def test_what_the_kernel_cannot_do_goes_to_torch_operations(monkeypatch):
    """And the call says why."""
    calls = watch(monkeypatch)
    matrices = make_params(shapes=((70, 66),))
    train(ao_optim.Muon8bit(matrices), matrices, 1)
    turned = make_params(shapes=((70, 66),))
    turned[0].data = turned[0].data.t().contiguous().t()
    train(ao_optim.SGD8bit(turned), turned, 1)
    sgd = ao_optim.SGD8bit(matrices, state_format="float32")
    sgd.state[matrices[0]].update(sgd.initial_state(matrices[0], sgd.param_groups[0]))
    state = sgd.state[matrices[0]]
    state["momentum_buffer"] = torch.zeros(66, 70).t()
    train(sgd, matrices, 1)
    assert [(call.op, kernel) for call, kernel in calls] == [
        ("rule_step", "reference_rule_step"),
        ("rule_step", "reference_rule_step"),
    ]
    assert (
        calls[0][0].obstacle
        == "the rule muon cannot be traced: it uses shape, which no program has"
    )
    assert calls[1][0].obstacle == "a gradient or a moment is not contiguous"


def test_a_rule_of_anyone_is_served(monkeypatch):
    def update(param, grad, state, options, step):
        state["momentum_buffer"].mul_(0.9).add_(grad.sign())
        param -= options["lr"] * state["momentum_buffer"]

    class Own(ao_optim.LowBitOptimizer):
        rule = replace(rules.SGD, name="own", update=update)

    calls = watch(monkeypatch)
    params, expected = make_params(), make_params()
    train(Own(params, momentum=0.5), params)
    assert {kernel for _, kernel in calls} == {"cpu_rule_step"}
    with kernels("reference"):
        train(Own(expected, momentum=0.5), expected)
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-5)


def test_stochastic_rounding_keeps_the_mean_of_parameters_and_dense_moments():
    """A moment of bfloat16 that would stand still: each step adds less than half of its step."""
    param = torch.nn.Parameter(torch.full((100_000,), 1.0, dtype=torch.bfloat16))
    optimizer = ao_optim.SGD8bit(
        [param], lr=1e-3, momentum=0.9, state_format="bfloat16", rounding="stochastic", seed=3
    )
    optimizer.state[param].update(optimizer.initial_state(param, optimizer.param_groups[0]))
    optimizer.state[param]["momentum_buffer"].fill_(1.0)
    param.grad = torch.full_like(param, 0.101)
    optimizer.step()
    assert abs(optimizer.state[param]["momentum_buffer"].double().mean() - 1.001) < 2e-4
    assert abs(param.double().mean() - (1 - 1e-3 * 1.001)) < 2e-4
    drawn = torch.stack(
        [param.detach().double(), optimizer.state[param]["momentum_buffer"].double()]
    )
    assert abs(torch.corrcoef(drawn)[0, 1]) < 0.02  # each has noise of its own


def test_nan_spreads_to_all_scales_of_rows_and_columns():
    (param,) = make_params(shapes=((130, 66),))
    optimizer = ao_optim.AdamW4bit([param])
    param.grad = torch.ones_like(param)
    param.grad[3, 5] = torch.nan
    optimizer.step()
    assert int(param.isnan().sum()) == 1
    second = optimizer.state[param]["exp_avg_sq"]
    assert second.parts["rows"].isnan().all()
    assert second.parts["columns"].isnan().all()
    first = optimizer.state[param]["exp_avg"].dequantize()
    assert int(first.isnan().sum()) == 128


def test_any_number_of_threads_makes_the_same_step():
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = make_params(shapes=((301, 221), (9, 5000)))
            optimizer = ao_optim.AdamW4bit(params)
            train(optimizer, params, 2)
        finally:
            torch.set_num_threads(before)
        found.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_formats_decide():
    call = StepCall("rule_step", (), 700, torch.float32, torch.float32, "cpu")
    assert select(call).name == "cpu_rule_step"
    assert select(replace(call, param_dtype=torch.float64)).name == "reference_rule_step"
    assert select(replace(call, obstacle="anything")).name == "reference_rule_step"
