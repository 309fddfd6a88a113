"""Parameters in 16 bits whose updates are smaller than their steps."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ao_optim
from ao_core.testing.base import same_bits


def _decayed(rounding, dtype=torch.bfloat16, **options):
    """1 - 0.0005 for each of 64 steps, each a tenth of what bfloat16 resolves below 1."""
    param = nn.Parameter(torch.ones(65, 80, dtype=dtype))
    optimizer = ao_optim.SGD8bit([param], lr=5e-4, momentum=0.0, rounding=rounding, **options)
    for _ in range(64):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return param.detach().float()


def test_nearest_stands_still():
    assert torch.equal(_decayed("nearest"), torch.ones(65, 80))


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize(("dtype", "better"), [("bfloat16", "stochastic"), ("float16", "kahan")])
def test_one_warning_where_nobody_chose(dtype, better, wrapped):
    param = nn.Parameter(torch.ones(8, 8, dtype=getattr(torch, dtype)))
    make = ao_optim.CPUOffloadOptimizer if wrapped else ao_optim.AdamW8bit
    with pytest.warns(
        ao_optim.LostUpdatesWarning, match=f"{dtype}.* give rounding='{better}'"
    ) as w:
        make([param])
    assert [each.filename for each in w] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make([param], rounding="nearest")
        make([param], rounding="kahan")
        make([nn.Parameter(torch.ones(8, 8))])
        ao_optim.AdamW8bit([param.detach()])


def test_stochastic_rounding_keeps_the_mean():
    found = _decayed("stochastic", seed=3)
    # deviation of the mean: less than 64 roundings of half a step, over 5200 elements
    assert float(found.mean()) == pytest.approx(1 - 64 * 5e-4, abs=2e-3)
    assert len(found.unique()) > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kahan_follows_every_element(dtype):
    found = _decayed("kahan", dtype)
    assert torch.allclose(
        found, torch.tensor(1 - 64 * 5e-4), atol=5e-3 if dtype == torch.bfloat16 else 6e-4
    )


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "LAMB8bit"])
def test_kahan_is_nearly_float32(name, make_params, run_steps):
    shape = (70, 65)
    kept, full = make_params(shape, dtype=torch.bfloat16), make_params(shape)
    full[0].data.copy_(kept[0].data)
    for params, options in ((kept, {"rounding": "kahan"}), (full, {})):
        optimizer = getattr(ao_optim, name)(params, lr=1e-4, **options)
        for step in range(30):
            params[0].grad = torch.full_like(params[0], 1.0 + step)
            optimizer.step()
    exact = kept[0].detach().float()
    assert (exact - full[0].detach()).abs().max() < 2.0**-7 * 4
    assert (exact - full[0].detach()).abs().mean() < 2e-3


def test_noise_depends_on_seed_and_step_alone():
    state = torch.get_rng_state()
    first, again, other = (_decayed("stochastic", seed=s) for s in (1, 1, 2))
    assert same_bits(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_draws_the_seed():
    found = [_decayed("stochastic", seed=torch.Generator().manual_seed(s)) for s in (5, 5, 6)]
    assert same_bits(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_resumes_with_the_same_noise(make_params, run_steps):
    params = make_params((70, 65), (4097,), dtype=torch.bfloat16)
    optimizer = ao_optim.AdamW8bit(params, rounding="stochastic", seed=7)
    run_steps(optimizer, params, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    other = ao_optim.AdamW8bit(copies, rounding="stochastic", seed=8)
    other.load_state_dict(optimizer.state_dict())
    for each, its in ((params, optimizer), (copies, other)):
        run_steps(its, each, 3, first=3)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(params, copies, strict=True))
