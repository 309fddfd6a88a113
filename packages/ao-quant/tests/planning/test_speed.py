"""`plan(tokens_per_second=)`: the least error in a model that is fast enough, by a clock of the tests."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ao_core import QTensor, quantize_
from ao_core.ext import ConfigError
from ao_quant import QuantizationPlan, plan
from ao_quant.planning import planner
from ao_quant.planning.speed import Clock, first_token

FEW = ("int8_weight_only", "int4_weight_only/g32-asymmetric", "intx_weight_only/2bit")


@pytest.fixture
def data(ids):
    return [ids, ids.flip(0)]


@pytest.fixture
def clock(monkeypatch, model):
    """1 ms, and 0.1 µs per byte of the weights; 5 % more per byte where formats are mixed."""
    dense = sum(p.nbytes for p in model.parameters() if p.dim() > 1)
    seen = []

    def timer(trial) -> float:
        new = [tensor for _, tensor in trial.replacements]
        assert all(isinstance(tensor, QTensor) for tensor in new)
        before = sum(4 * tensor.numel() for tensor in new)
        size = dense - before + sum(tensor.canonical().stored_bytes for tensor in new)
        mixed = 1.05 if len({str(tensor.spec) for tensor in new}) > 1 else 1.0
        seen.append(1e-3 + 1e-7 * size * mixed)
        return seen[-1]

    monkeypatch.setattr(planner, "Clock", partial(Clock, timer=timer))
    return seen


def test_the_least_error_that_is_fast_enough(model, data, clock) -> None:
    dense = plan(model, tokens_per_second=1.0, data=data, measure="kl", candidates=FEW)
    assert dense.picks == (0,) * len(dense.picks)  # which is fast enough
    assert dense.error == 0.0
    slow, middle, fast = (each.speed for each in dense.uniform if each.heads)
    assert slow < middle < fast
    for wanted in (slow, (slow + middle) / 2, middle, 0.99 * fast):
        found = plan(model, tokens_per_second=wanted, data=data, measure="kl", candidates=FEW)
        assert found.speed >= wanted
        assert found.measured is not None
        # no candidate everywhere that is fast enough is better
        for each in found.uniform:
            if each.speed >= wanted and each.measured is not None:
                assert found.measured <= each.measured
        assert QuantizationPlan.from_json(found.to_json()) == found
        assert f"{found.speed:.4g} tokens/s" in str(found)
    assert len(set(found.picks)) == 1
    quantize_(model, found)


def test_what_cannot_be_met(model, data, clock) -> None:
    with pytest.raises(ConfigError, match=r"cannot be met: the fastest that was measured is \d"):
        plan(model, tokens_per_second=1e6, data=data, measure="kl", candidates=FEW)
    with pytest.raises(ConfigError, match="exactly one of budget, bits, max_kl and tokens_per_sec"):
        plan(model, tokens_per_second=1e6, bits=4.0, data=data)
    with pytest.raises(ConfigError, match="bits times nothing; leave it out"):
        plan(model, bits=4.0, timed=data[0], data=data)
    with pytest.raises(ConfigError, match="pass timed="):
        plan(torch.nn.Linear(8, 8), tokens_per_second=5, data=[torch.randn(4, 8)])


def test_the_real_clock(model, ids) -> None:
    """Of this machine, so that only what holds on any is said."""
    found = plan(model, tokens_per_second=0.01, data=[ids], measure="kl", candidates=FEW)
    assert found.speed > 0.01
    assert all(each.speed > 0 for each in found.uniform)
    layer = torch.nn.Linear(64, 64)
    rows = torch.randn(4, 64)
    timed = plan(layer, tokens_per_second=0.01, data=[rows], timed=rows[:1], candidates=FEW)
    assert timed.speed > 0.01


def test_the_first_token() -> None:
    ids, mask = torch.arange(6).reshape(2, 3), torch.ones(2, 3)
    found = first_token({"input_ids": ids, "attention_mask": mask, "use_cache": False})
    assert found["input_ids"].tolist() == [[0]]
    assert found["attention_mask"].shape == (1, 1)
    assert found["use_cache"] is False
    assert first_token(ids).tolist() == [[0]]
    assert first_token(mask) is None
    assert first_token((ids,)) is None
