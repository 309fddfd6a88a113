"""Quantized state: its size, its error, and which parameters have it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import ao_optim
from ao_core import QTensor, kernels
from ao_core.ext import UnknownNameError, UnsupportedOp
from ao_core.testing.base import gaussian, same_bits
from ao_optim import adam, apply, engine
from ao_optim.formats import FORMATS, empty_state, format_named
from ao_optim.optimizers import __all__ as NAMES

#: rule -> learning rate at which a thousand steps of it reach a hundredth
RATES = {
    "AdamW8bit": 0.02,
    "SGD8bit": 0.02,
    "Lion8bit": 0.01,
    "AdEMAMix8bit": 0.02,
    "RMSprop8bit": 0.02,
    "Adagrad8bit": 0.5,
    "LAMB8bit": 0.02,
    "Muon8bit": 0.05,
}


@pytest.mark.parametrize("state_format", list(FORMATS))
@pytest.mark.parametrize("name", list(RATES))
def test_every_rule_in_every_format(name, state_format):
    """Least squares with curvatures over a decade: 100 steps halve the loss; Adam: a thousand end it."""
    steps = 1000 if name == "AdamW8bit" else 100
    curvature = torch.logspace(-1, 0, 70).expand(65, 70)
    param, solution = nn.Parameter(gaussian((65, 70))), gaussian((65, 70), seed=1)
    optimizer = getattr(ao_optim, name)([param], lr=RATES[name], state_format=state_format)
    losses = []
    for _ in range(steps):
        error = param.detach() - solution
        losses.append(float((curvature * error**2).sum()))
        param.grad = 2 * curvature * error
        optimizer.step()
    assert losses[-1] < (0.001 if steps == 1000 else 0.7) * losses[0]
    quantized = [isinstance(v, QTensor) for v in optimizer.state[param].values()]
    assert any(quantized) == (state_format not in ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("AdamW8bit", 2.0, 2.06), ("AdamWFp8", 2.0, 2.06), ("AdamW4bit", 1.0, 1.08)],
)
def test_bytes_of_the_file(name, least, most, make_params, run_steps, tmp_path):
    params = make_params((1024, 515), (515,))
    optimizer = getattr(ao_optim, name)(params)
    run_steps(optimizer, params, 1)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    elements = sum(p.numel() for p in params)
    assert least < (tmp_path / "state.pt").stat().st_size / elements < most
    total = ao_optim.state_report(optimizer).total
    assert least < total.bytes_per_element < most
    assert (total.elements, total.adamw_bytes) == (elements, 8 * elements)


def test_small_parameters_keep_full_state(make_params, run_steps):
    params = make_params((63, 65), (64, 64), (4096,), ())
    optimizer = ao_optim.AdamW8bit(params)
    run_steps(optimizer, params, 1)
    kept = [isinstance(optimizer.state[p]["exp_avg"], QTensor) for p in params]
    assert kept == [False, True, True, False]
    other = ao_optim.AdamW8bit(params[:1], min_quantized_numel=0)
    run_steps(other, params[:1], 1)
    assert isinstance(other.state[params[0]]["exp_avg"], QTensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "Lion8bit"])
def test_small_parameters_in_16_bits(name, dtype, make_params, run_steps, monkeypatch):
    """Half of the state that torch keeps in their dtype, and one call steps all of them."""
    params = make_params(*((n,) for n in (300, 2000, 512)), (20, 64), dtype=dtype)
    optimizer = getattr(ao_optim, name)(params)
    calls, real = [], apply._step
    monkeypatch.setattr(apply, "_step", lambda *args: calls.append(args) or real(*args))
    run_steps(optimizer, params, 1)
    assert len(calls) == 1
    moments = len(optimizer.rule.slots(optimizer.param_groups[0]))
    assert ao_optim.state_report(optimizer).total.bytes_per_element < 1.06 * moments
    for options in ({"state_format": "float32"}, {"min_quantized_numel": 0}):
        other = getattr(ao_optim, name)(params[:1], **options)
        run_steps(other, params[:1], 1)
        (moment, *_) = [v for v in other.state[params[0]].values() if v.dim()]
        found = moment.spec if isinstance(moment, QTensor) else None
        assert found == FORMATS[other.param_groups[0]["state_format"]].spec(True, (300,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state_format", list(FORMATS))
def test_another_format_in_the_middle_of_a_run(name, state_format, make_params, run_steps):
    """It takes effect at the next step, with the moments that there are."""
    params = make_params((70, 65))
    optimizer = getattr(ao_optim, name)(params, lr=1e-3)
    run_steps(optimizer, params, 2)
    slots = optimizer.rule.slots(optimizer.param_groups[0])
    before = copy.deepcopy(optimizer.to_full_state()["state"][0])
    optimizer.param_groups[0] |= {"state_format": state_format, "lr": 0.0, "weight_decay": 0.0}
    params = optimizer.param_groups[0]["params"]
    params[0].grad = None  # a step of nothing
    optimizer.step()
    state = optimizer.state[params[0]]
    for slot in slots:
        moment, old = state[slot.name], before[slot.name]
        expected = FORMATS[state_format].spec(slot.signed, (70, 65)) or torch.float32
        assert (moment.spec if isinstance(moment, QTensor) else moment.dtype) == expected
        bound = 0.4 if state_format == "rank1_4bit" else 0.05
        assert float((moment.to(torch.float32) - old).norm()) <= bound * float(old.norm())
    run_steps(optimizer, params, 1, first=2)
    assert float(state["step"]) == 3


def test_other_storage_in_the_middle_of_a_run(make_params, run_steps):
    params = make_params((70, 65), (60,), dtype=torch.bfloat16)
    optimizer = ao_optim.AdamW8bit(params, rounding="nearest")
    run_steps(optimizer, params, 1)
    group = optimizer.param_groups[0]
    group["rounding"] = "kahan"
    run_steps(optimizer, params, 1, first=1)
    assert all("compensation" in optimizer.state[p] for p in params)
    group["rounding"] = "stochastic"
    group["min_quantized_numel"] = 1 << 30
    run_steps(optimizer, params, 1, first=2)
    assert not any("compensation" in optimizer.state[p] for p in params)
    for name, value in (("state_format", "int3"), ("rounding", "up")):
        kept, group[name] = group[name], value
        before = [p.detach().clone() for p in params]
        with pytest.raises((ValueError, UnknownNameError), match=value):
            run_steps(optimizer, params, 1, first=3)
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        group[name] = kept
    run_steps(optimizer, params, 1, first=3)


@pytest.mark.parametrize("state_format", [f for f in FORMATS if f != "float32"])
def test_one_step_is_exact_and_many_are_near(state_format, make_params, run_steps):
    """Moments are quantized after they are used, so the first step is that of float32."""
    ours, full = make_params((129, 70)), make_params((129, 70))
    optimizer = ao_optim.AdamW8bit(ours, lr=0.01, state_format=state_format)
    reference = torch.optim.AdamW(full, lr=0.01)
    run_steps(optimizer, ours, 1)
    run_steps(reference, full, 1)
    torch.testing.assert_close(ours[0], full[0], rtol=0, atol=1e-6)
    start = full[0].detach().clone()
    run_steps(optimizer, ours, 20, first=1)
    run_steps(reference, full, 20, first=1)
    error = float((ours[0] - full[0]).detach().norm() / (full[0] - start).detach().norm())
    low, high = {
        "rank1_4bit": (0.02, 0.4), "float8": (0.005, 0.1), "bfloat16": (0.0001, 0.01),
    }.get(state_format, (0.002, 0.05))  # fmt: skip
    assert low < error < high


def test_moments_in_bfloat16(make_params, run_steps):
    """Two bytes each, of small parameters too; loaded in float32 and back they are the same."""
    params = make_params((70, 65), (12,), dtype=torch.bfloat16)
    optimizer = ao_optim.AdamW8bit(params, state_format="bfloat16", rounding="stochastic")
    run_steps(optimizer, params, 3)
    assert {v.dtype for p in params for v in optimizer.state[p].values() if v.dim()} == {
        torch.bfloat16
    }
    assert 4 <= ao_optim.state_report(optimizer).total.bytes_per_element < 4.01
    other = ao_optim.AdamW8bit(params, state_format="bfloat16", rounding="stochastic")
    other.load_state_dict(optimizer.to_full_state())
    for p in params:
        for name, value in optimizer.state[p].items():
            assert torch.equal(other.state[p][name], value)


def test_a_slow_average_in_bfloat16_does_not_stand_still():
    """Rounded at random its mean is right; to nearest, a change by a thousandth is none at all."""
    squares = {}
    for rounding in ("stochastic", "nearest"):
        param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
        optimizer = ao_optim.AdamW8bit([param], state_format="bfloat16", rounding=rounding)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.state[param]["exp_avg_sq"].fill_(1.0)
        for _ in range(300):
            optimizer.step()
        squares[rounding] = float(optimizer.state[param]["exp_avg_sq"].float().mean())
    assert squares["stochastic"] == pytest.approx(0.999**300, rel=0.01)
    assert squares["nearest"] == 1


@pytest.mark.parametrize("state_format", list(FORMATS))
def test_empty_state_is_zero(state_format):
    for signed in (True, False):
        for shape in ((70, 65), (4097,)):
            spec = format_named(state_format).spec(signed, shape)
            assert not empty_state(torch.empty(shape), spec).to(torch.float32).abs().sum()


def test_rows_without_gradients_stay_at_zero(make_params):
    """A second moment of 0 may not become the least value of its codes: the row could not learn."""
    (param,) = make_params((64, 256))
    optimizer = ao_optim.AdamW4bit([param], lr=0.1, weight_decay=0.0)
    start = param.detach().clone()
    for step in range(20):
        grad = gaussian((64, 256), seed=step)
        if step < 19:
            grad[:32] = 0
        param.grad = grad
        optimizer.step()
    first = (param.detach() - start)[:32].abs().mean()
    # 0.1 * (1 - 0.9) / sqrt(1 - 0.999), with both biases of the 20th step
    assert 0.03 < float(first) < 0.3


@pytest.mark.parametrize(
    "chosen", [nullcontext, partial(kernels, "reference")], ids=["best", "reference"]
)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "RMSprop8bit"])
def test_float8_divides_by_no_square_that_became_zero(name, chosen):
    """Gradients over 14 octaves in a block, then none: parameters move as with moments in float32.

    Squares in e4m3 would become 0 for half of them, and the last step thousands of times as long.
    """
    sizes = torch.linspace(-14, 0, 4096).exp2().view(16, 256).t().contiguous()
    ends = []
    for state_format in ("float8", "float32"):
        param = nn.Parameter(torch.zeros(256, 16))
        optimizer = getattr(ao_optim, name)([param], lr=1.0, state_format=state_format)
        with chosen():
            for step in range(12):
                param.grad = sizes * (step < 10)
                optimizer.step()
        ends.append(param.detach())
    found, expected = ends
    assert float(((found - expected) / expected).abs().max()) < 0.15


def test_chunks_change_nothing(make_params, run_steps, monkeypatch):
    """Pieces of large tensors, and several small ones at once, give the bits of one tensor at a time."""
    shapes = ((70, 90), (8193,), (4097,), (3, 1500), (5,), (7, 3))
    ends = []
    for chunk in (512, 8192, 1 << 18):
        monkeypatch.setattr(engine, "CHUNK", chunk)
        params = make_params(*shapes)
        optimizer = ao_optim.AdamW8bit(params, lr=0.01)
        run_steps(optimizer, params, 3)
        ends.append(params)
    alone = make_params(*shapes)
    for number, param in enumerate(alone):
        optimizer = ao_optim.AdamW8bit([param], lr=0.01)
        for step in range(3):
            param.grad = gaussian(tuple(param.shape), seed=1000 * step + number)
            optimizer.step()
    for params in ends:
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(params, alone, strict=True))


def test_strided_parameters(run_steps):
    """Transposed parameters and channels last give what contiguous ones give."""
    dense = [gaussian((70, 65)).t(), gaussian((8, 16, 8, 5)).to(memory_format=torch.channels_last)]
    for state_format in ("dynamic8", "rank1_4bit"):
        ends = []
        for values in (dense, [d.contiguous() for d in dense]):
            params = [nn.Parameter(v.clone(memory_format=torch.preserve_format)) for v in values]
            run_steps(ao_optim.AdamW8bit(params, state_format=state_format), params, 3)
            ends.append(params)
        assert not ends[0][0].is_contiguous()
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_kernel_is_chosen_from_the_table(make_params, run_steps, monkeypatch):
    """Adam's parameters go through the op `adam_step`, all of a kind at once; small ones are dense."""
    calls = []
    real = apply.run_kernel

    def watched(call, *args, **kwargs):
        calls.append(call)
        return real(call, *args, **kwargs)

    monkeypatch.setattr(apply, "run_kernel", watched)
    params = make_params((70, 65), (4097,), (5,), (4, 3))
    params += make_params((70, 65), dtype=torch.bfloat16)
    run_steps(ao_optim.AdamW8bit(params), params, 1)
    found = {(call.op, call.specs[0].dtype, call.numel, call.param_dtype) for call in calls}
    assert found == {
        ("adam_step", "companded8", 70 * 65 + 4097, torch.float32),
        ("adam_step", "companded8", 70 * 65, torch.bfloat16),
        ("adam_step", "fp32", 5 + 12, torch.float32),
    }


def test_a_loaded_state_is_stepped_all_at_once(make_params, run_steps, monkeypatch, tmp_path):
    params = make_params((70, 65), (4097,), (66, 70))
    first, second = ao_optim.AdamW8bit(params), ao_optim.AdamW8bit(params)
    run_steps(first, params, 1)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    calls, real = [], apply.run_kernel

    def watched(call, *args, **kwargs):
        calls.append(call)
        return real(call, *args, **kwargs)

    monkeypatch.setattr(apply, "run_kernel", watched)
    run_steps(second, params, 1)
    assert [call.numel for call in calls] == [70 * 65 + 4097 + 66 * 70]


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"maximize": True}])
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_dense_moments_go_to_the_fused_step_of_torch(name, options, make_params, run_steps):
    """It does what the reference does, to gradients in 16 bits too; other dtypes it leaves alone."""
    ends = []
    for band in ("torch", "reference"):
        params = make_params((37, 23), (11,))
        optimizer = getattr(ao_optim, name)(params, lr=0.01, **options)
        with kernels(band):
            run_steps(optimizer, params, 5)
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    half, full = [torch.full((5,), 0.5, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    moments = [[torch.zeros(5)], [torch.zeros(5)]]
    given = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 0.0, "weight_decay": 0.0, "step": 1}
    adam.fused_adam_step(
        [full], [half], *moments, **given, decoupled=True, maximize=False, seed=None
    )
    assert torch.allclose(full, torch.tensor(0.4))
    params = make_params((5,), dtype=half.dtype)
    optimizer = ao_optim.AdamW8bit(params, state_format="float32")
    with kernels("torch"), pytest.raises(UnsupportedOp, match=r"not torch\.bfloat16"):
        run_steps(optimizer, params, 1)


def test_names_follow_rules():
    assert len(NAMES) == 13
    for name in NAMES:
        cls = getattr(ao_optim, name)
        assert name.lower().startswith(cls.rule.name)
        assert cls.format == {"4bit": "rank1_4bit", "8bit": "companded8"}.get(name[-4:], "float8")
