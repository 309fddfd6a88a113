"""`recommend`: figures are those of an independent computation, and the choice is what its words say."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ao_core import QTensor, config_from_json, quantize_
from ao_core.ext import ConfigError, UnknownNameError
from ao_quant import (
    Compared,
    GPTQConfig,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    plan,
    recommend,
)
from ao_quant.recommending.result import pick

RECIPES = ["int8_weight_only", "int4_weight_only/g32-asymmetric", "intx_weight_only/2bit"]


class Classifier(nn.Module):
    """Logits in an object, as models of transformers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96))
        self.end = nn.Linear(96, 10)

    def forward(self, x):
        return SimpleNamespace(logits=self.end(self.body(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Classifier().eval().requires_grad_(False)


@pytest.fixture
def data():
    return [torch.randn(2, 20, 64) * 4 for _ in range(3)]


def seconds(made):
    """A machine on which integers of 8 bits are fast, and of 4 bits as fast."""
    weight = made.body[0].weight if isinstance(made, Classifier) else made[0].weight
    if not isinstance(weight, QTensor):
        return 3.0
    return {"int8": 1.0, "uint4": 0.99}.get(weight.spec.dtype, 2.0)


def test_figures_and_the_choice(model, data, tmp_path):
    before = copy.deepcopy(model.state_dict())
    found = recommend(model, data, candidates=RECIPES, timer=seconds, max_loss=10.0)
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    for row in found.rows[1:]:
        other = copy.deepcopy(model)
        report = quantize_(other, row.config)
        p, q = (
            torch.cat([m(x).logits.double().log_softmax(-1) for x in data]) for m in (model, other)
        )
        assert row.bytes == report.bytes_after
        assert row.loss == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
        assert row.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert [row.speedup for row in found.rows] == pytest.approx([1.0, 3.0, 3 / 0.99, 1.5])
    assert found.chosen.name == "int8_weight_only"  # as fast, and loses less
    assert "of those that lose at most 10 nats, it is the fastest" in found.chosen.reason
    text = str(found)
    assert max(map(len, text.splitlines()[:6])) <= 120
    assert "KL, nats" in text
    assert "calls/s" in text
    found.save(tmp_path / "best.json")
    assert config_from_json((tmp_path / "best.json").read_text()) == found.config


def test_the_least_loss_within_a_budget(model, data):
    sizes = {
        row.name: row for row in recommend(model, data, candidates=RECIPES, timer=seconds).rows
    }
    limit = sizes[RECIPES[1]].bytes
    found = recommend(model, data, candidates=RECIPES, timer=seconds, budget=limit)
    assert found.chosen.name == RECIPES[1]
    assert found.rows[1].loss is None  # too large, so not measured
    assert found.rows[1].reason == "too large"
    with pytest.raises(
        ConfigError, match=r"budget=1000: no candidate fits; the smallest is intx.* with"
    ):
        recommend(model, data, candidates=RECIPES, timer=seconds, budget=1000)


def test_dense_where_nothing_is_good_enough(model, data):
    found = recommend(model, data, candidates=RECIPES, timer=seconds, max_loss=0)
    assert found.config is None
    assert "loses nothing" in str(found)
    with pytest.raises(ConfigError, match="best left dense"):
        found.save("anywhere.json")


def test_answers_that_are_no_logits_and_the_default_timer(data):
    layers = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).requires_grad_(False)
    found = recommend(layers, data, candidates=RECIPES, rounds=1)
    assert found.measure == "output"
    for row in found.rows[1:]:
        other = copy.deepcopy(layers)
        quantize_(other, row.config)
        right, new = (torch.cat([m(x) for x in data]).double() for m in (layers, other))
        expected = float((new - right).square().sum() / right.square().sum())
        assert row.loss == pytest.approx(expected, rel=1e-4)
        assert row.agreement is None
        assert row.seconds > 0


def test_candidates_that_need_data_plans_and_those_that_do_nothing(model, data):
    rows = [x.reshape(-1, 64) for x in data]
    planned = plan(model, bits=5, data=rows, measure="kl", candidates=RECIPES)
    gptq = GPTQConfig(Int4WeightOnlyConfig(32))
    found = recommend(model, rows, candidates=[gptq, planned], timer=seconds, max_loss=10.0)
    assert [row.name for row in found.rows] == [
        "dense",
        "gptq/int4_weight_only/g32-asymmetric",
        f"plan {planned.hash}",
    ]
    assert all(row.loss > 0 for row in found.rows[1:])
    none = recommend(
        model,
        rows,
        candidates=[Int8WeightOnlyConfig()],
        filter_fn=lambda m, n: False,
        timer=seconds,
    )
    assert none.rows[1].reason == "changes nothing"
    assert none.config is None


def test_ties_of_speed_go_to_the_least_loss_and_reasons_stay():
    rows = [
        Compared(None, 100, 0.0, 1.0, 1.0, 1.0),
        Compared(Int8WeightOnlyConfig(), 50, 0.01, 0.9, 0.5, 2.0),
        Compared(Int4WeightOnlyConfig(), 25, 0.02, 0.9, 0.5, 2.1),
        Compared(Int4WeightOnlyConfig(32), 100, reason="not possible: it is odd"),
    ]
    told, best = pick(rows, None, 0.05, "kl")
    assert best == 1
    assert [row.reason for row in told[::3]] == ["slower, or loses more", "not possible: it is odd"]
    assert pick([*rows[:2], replace(rows[2], speedup=2.3)], None, 0.05, "kl")[1] == 2
    assert pick([rows[0], replace(rows[1], speedup=0.5)], None, 0.05, "kl")[1] == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "1MB", "max_loss": 0.1}, ConfigError, "give one of the two"),
        ({"budget": "many"}, ConfigError, "budget='many'"),
        ({"max_loss": -1.0}, ConfigError, "max_loss=-1.0: use 0 or more"),
        ({"rounds": 0}, ConfigError, "rounds=0"),
        ({"candidates": []}, ConfigError, "candidates="),
        ({"candidates": ["int9_weight_only"]}, UnknownNameError, "int9_weight_only"),
    ],
)
def test_refusals(model, data, options, error, message):
    with pytest.raises(error, match=message):
        recommend(model, data, **options)


def test_quantized_models_are_refused(model, data):
    quantize_(model, "int8_weight_only")
    with pytest.raises(ConfigError, match="quantized already"):
        recommend(model, data)
