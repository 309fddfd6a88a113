"""State dicts of torch's optimizers and of bitsandbytes', and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ao_optim
from ao_core import QTensor, quantize_tensor
from ao_core.ext import CheckpointError
from ao_core.ext.numerics import dynamic_values
from ao_core.testing.base import gaussian, same_bits

SHAPES = ((97, 71), (71,))


def test_from_torch_and_back(make_params, run_steps):
    params, ours = make_params(*SHAPES), make_params(*SHAPES)
    full = torch.optim.AdamW(params, lr=0.25, weight_decay=0.5)
    run_steps(full, params, 3)
    optimizer = ao_optim.AdamW8bit(ours)
    optimizer.load_state_dict(full.state_dict())
    moment = optimizer.state[ours[0]]["exp_avg_sq"]
    assert isinstance(moment, QTensor)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (
        0.25,
        0.5,
    )
    back = torch.optim.AdamW(make_params(*SHAPES))
    back.load_state_dict(optimizer.to_full_state())
    for name in ("exp_avg", "exp_avg_sq"):
        for mine, theirs in zip(back.state.values(), full.state.values(), strict=True):
            error = (mine[name] - theirs[name]).norm() / theirs[name].norm()
            assert error < 0.02
            assert error == 0 or theirs[name].numel() > 4096
            assert mine["step"] == theirs["step"] == 3
    assert isinstance(optimizer.state[ours[0]]["exp_avg"], QTensor), "the state itself is as it was"


@pytest.mark.parametrize("name", ["AdamW4bit", "AdamWFp8"])
def test_between_formats(name, make_params, run_steps):
    """State comes into the format of the optimizer that loads it."""
    params, ours = make_params(*SHAPES), make_params(*SHAPES)
    optimizer = ao_optim.AdamW8bit(params)
    run_steps(optimizer, params, 2)
    other = getattr(ao_optim, name)(ours)
    other.load_state_dict(optimizer.state_dict())
    spec = other.state[ours[0]]["exp_avg"].spec
    assert spec == ao_optim.FORMATS[other.format].signed
    run_steps(other, ours, 1)


def test_squares_in_e4m3(make_params, run_steps):
    """The state of float8 as it was before squares had a format of their own."""
    params, ours = make_params(*SHAPES), make_params(*SHAPES)
    optimizer = ao_optim.AdamWFp8(params)
    run_steps(optimizer, params, 2)
    saved = optimizer.state_dict()
    moment = saved["state"][0]["exp_avg_sq"].dequantize()
    saved["state"][0]["exp_avg_sq"] = quantize_tensor(moment, ao_optim.FORMATS["float8"].signed)
    other = ao_optim.AdamWFp8(ours)
    other.load_state_dict(saved)
    loaded = other.state[ours[0]]["exp_avg_sq"]
    assert loaded.spec == ao_optim.FORMATS["float8"].unsigned
    torch.testing.assert_close(
        loaded.dequantize(), moment, rtol=0.13, atol=1e-3 * float(moment.max())
    )
    run_steps(other, ours, 1)


def _bitsandbytes(shape, seed):
    """What its 8-bit optimizers keep of one parameter, and the moments that it stands for."""
    table = {signed: torch.tensor(dynamic_values(8, signed)) for signed in (True, False)}
    state, moments = {"step": 4}, []
    wrapped = {}
    for number, signed in ((1, True), (2, False)):
        generator = torch.Generator().manual_seed(seed + number)
        codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        blocks = -(-codes.numel() // 256)
        absmax = torch.rand(blocks, generator=generator)
        wrapped |= {f"state{number}": codes, f"qmap{number}": table[signed]}
        wrapped |= {f"absmax{number}": absmax}
        scales = absmax.repeat_interleave(256)[: codes.numel()].view(shape)
        moments.append(table[signed][codes.long()] * scales)
    return {**state, "__bnb_optimizer_quant_state__": wrapped}, moments


def test_from_bitsandbytes(make_params, run_steps):
    params = make_params((97, 71), (71,))
    quantized, moments = _bitsandbytes((97, 71), 0)
    small = {"step": 4, "state1": gaussian((71,), seed=3), "state2": gaussian((71,), seed=4).abs()}
    group = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.25, "params": [0, 1]}
    saved = {"state": {0: quantized, 1: small}, "param_groups": [group]}
    optimizer = ao_optim.AdamW8bit(params, state_format="dynamic8")
    optimizer.load_state_dict(saved)
    state = optimizer.state[params[0]]
    for name, expected in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert isinstance(state[name], QTensor)
        assert same_bits(state[name].dequantize(), expected)
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], small["state1"])
    assert (float(state["step"]), optimizer.param_groups[0]["lr"]) == (4.0, 0.5)
    run_steps(optimizer, params, 1)
    # AdEMAMix stacks its two first averages
    wrapped = quantized["__bnb_optimizer_quant_state__"]
    both = {n: torch.stack([wrapped[n]] * 2) for n in ("state1", "absmax1")}
    group = {**group, "betas": (0.8, 0.9, 0.99)}
    saved = {
        "state": {0: {"step": 4, **wrapped, **both}},
        "param_groups": [{**group, "params": [0]}],
    }
    optimizer = ao_optim.AdEMAMix8bit(params[:1], state_format="dynamic8")
    optimizer.load_state_dict(saved)
    for name, expected in (("exp_avg", 0), ("exp_avg_slow", 0), ("exp_avg_sq", 1)):
        assert same_bits(optimizer.state[params[0]][name].dequantize(), moments[expected])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"qmap1": torch.linspace(-1, 1, 256)}, "dynamic map"),
        ({"absmax2": torch.ones(3)}, "3 scales"),
        ({"state2": None}, "not that of"),
    ],
)
def test_bad_bitsandbytes(damage, message, make_params):
    params = make_params((97, 71))
    state, _ = _bitsandbytes((97, 71), 0)
    state["__bnb_optimizer_quant_state__"] |= damage
    group = {**ao_optim.AdamW8bit(params).state_dict()["param_groups"][0]}
    with pytest.raises((CheckpointError, ValueError), match=message):
        ao_optim.AdamW8bit(params).load_state_dict({"state": {0: state}, "param_groups": [group]})


@pytest.mark.parametrize(
    ("other", "shapes", "message"),
    [
        (torch.optim.SGD, SHAPES, "momentum_buffer: it is not that of AdamW8bit"),
        (torch.optim.AdamW, ((71, 97), (71,)), r"exp_avg of parameter 0 has shape \(71, 97\)"),
        (torch.optim.AdamW, SHAPES[:1], "doesn't match the size of optimizer's group"),
    ],
    ids=["another optimizer", "another shape", "fewer parameters"],
)
def test_refused_state_changes_nothing(other, shapes, message, make_params, run_steps):
    theirs, params = make_params(*shapes), make_params(*SHAPES)
    options = {"momentum": 0.9} if other is torch.optim.SGD else {}
    saved = other(theirs, lr=0.5, **options)
    run_steps(saved, theirs, 1)
    optimizer = ao_optim.AdamW8bit(params)
    run_steps(optimizer, params, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


def test_amsgrad_is_refused(make_params, run_steps):
    params = make_params(*SHAPES)
    saved = torch.optim.AdamW(params, amsgrad=True)
    run_steps(saved, params, 1)
    with pytest.raises(ValueError, match="amsgrad"):
        ao_optim.AdamW8bit(params).load_state_dict(saved.state_dict())


def test_pickle_and_deepcopy(make_params, run_steps, tmp_path):
    params = make_params(*SHAPES)
    for optimizer in (ao_optim.AdamW4bit(params), ao_optim.CPUOffloadOptimizer(params)):
        run_steps(optimizer, params, 1)
        made = copy.deepcopy({"optimizer": optimizer, "params": params})
        run_steps(optimizer, params, 1, first=1)
        run_steps(made["optimizer"], made["params"], 1, first=1)
        for a, b in zip(params, made["params"], strict=True):
            assert same_bits(a.detach(), b.detach())


def test_hooks_see_the_dict(make_params, run_steps):
    params = make_params(*SHAPES)
    optimizer = ao_optim.AdamW8bit(params)
    run_steps(optimizer, params, 1)
    seen = []
    other = ao_optim.AdamW8bit([nn.Parameter(p.detach().clone()) for p in params])
    other.register_load_state_dict_pre_hook(lambda _, saved: seen.append(type(saved["state"][0])))
    other.register_load_state_dict_post_hook(lambda made: seen.append(len(made.state)))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [dict, 2]
