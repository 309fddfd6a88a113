"""`plan(data=)`: predicted from gradients, corrected and held against uniform recipes by measurements."""

from __future__ import annotations

import copy
from math import inf, log
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, config_from_json, quantize_, resolve_config
from ao_core.ext.calibration import evaluating
from ao_core.ext.quantizing import decide
from ao_quant import QuantizationPlan, plan
from ao_quant.planning.gradients import gradients_of, predicted_error
from ao_quant.planning.judging import Judge
from ao_quant.planning.ranks import rank_correlation

FEW = ("int8_weight_only", "int4_weight_only/g32-asymmetric", "intx_weight_only/2bit")


@pytest.fixture
def data(ids):
    return [ids, ids.flip(0)]


def kl_bits(model, other, batches):
    with torch.no_grad():
        p, q = (torch.cat([m(b) for b in batches]).double().log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean()) / log(2)


def test_every_kind_of_weight_is_predicted(model, data):
    """A tied embedding, linear layers, a convolution: within a factor of two of runs with each alone."""
    found = plan(model, bits=4.5, data=data, measure="kl", candidates=FEW)
    exact = plan(model, bits=4.5, sample=torch.cat(data), measure="kl", candidates=FEW)
    pairs = [
        (guess.error, truth.error)
        for one, other in zip(found.choices, exact.choices, strict=True)
        for guess, truth in zip(one.options[1:], other.options[1:], strict=True)
    ]
    assert len(pairs) == 12
    assert all(0.4 < guess / truth < 2.5 for guess, truth in pairs), pairs
    assert rank_correlation(pairs) > 0.9
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_expectation_of_predictions_is_the_second_order():
    """Of one linear layer to logits: Δᵀ F Δ / 2 with the Fisher information in closed form, float64."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4, bias=False), torch.randn(4000, 6)
    (entry,) = decide(layer, resolve_config("int8_weight_only"), None)
    delta = 0.01 * torch.randn(4, 6)
    new = SimpleNamespace(dequantize=lambda: layer.weight.detach() + delta)
    guesses = [
        predicted_error(entry, new, gradients_of(layer, list(x.split(1000)), [entry], "kl", seed))
        for seed in range(40)
    ]
    with evaluating(layer):
        p = layer(x).double().softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    # outputs as if they were independent
    blocks = torch.einsum(
        "tn,tn->", fisher.diagonal(dim1=1, dim2=2), (x.double() @ delta.T.double()) ** 2
    )
    expected = float(blocks) / 2 / len(x) / log(2)
    assert sum(guesses) / len(guesses) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("bits", [2.9, 3.5, 4.5, 4.8, 6.5, 8.2, 12.0])
def test_no_uniform_recipe_that_fits_is_better(model, data, bits):
    found = plan(model, bits=bits, data=data, measure="kl", candidates=FEW)
    made = copy.deepcopy(model)
    quantize_(made, found)
    assert found.measured == pytest.approx(kl_bits(model, made, data), rel=1e-3, abs=1e-9)
    # int8 is what output heads have anyway
    assert [u.heads for u in found.uniform] == [True, *[False, True] * (len(FEW) - 1)]
    for name in FEW:
        said = next(u for u in found.uniform if u.config == resolve_config(name) and u.heads)
        fits = plan(model, bits=99.0, measure="weight", candidates=[name]).uniform[-1]
        assert said.bytes == fits.bytes
    for said in found.uniform:
        other = copy.deepcopy(model)
        everywhere = FqnToConfig(dict.fromkeys((c.fqn for c in found.choices), said.config))
        quantize_(other, everywhere if said.heads else said.config)
        if said.measured is not None:
            assert said.measured == pytest.approx(kl_bits(model, other, data), rel=1e-3)
            assert found.measured <= said.measured


def test_a_uniform_recipe_is_taken_where_predictions_mislead(model, data, monkeypatch):
    """Whatever is predicted: what is measured decides."""
    monkeypatch.setattr(
        "ao_quant.planning.options.predicted_error",
        lambda entry, new, gradients: float(entry.fqn == "down.weight") * 1e-9 + 1e-6 / new.nbytes,
    )
    found = plan(model, bits=4.8, data=data, measure="kl", candidates=FEW)
    fitting = [u.measured for u in found.uniform if u.measured is not None]
    assert found.measured <= min(fitting)


def test_what_is_worse_is_not_measured_to_the_end(model, data):
    judge = Judge.of(model, data, measure="kl")
    (entry, *_) = decide(model, resolve_config("int8_weight_only"), None)
    changed = [(entry.owners, torch.zeros_like(entry.tensor))]
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    error = judge.error(changed)
    assert len(calls) == len(data) == 2
    assert judge.errors(changed)[0] == error
    calls.clear()
    assert judge.error(changed, at_most=error) == error
    assert len(calls) == 2
    calls.clear()
    assert judge.error(changed, at_most=0.4 * error) == inf
    assert len(calls) == 1
    hook.remove()


def test_a_divergence_by_data(model, data):
    found = plan(model, max_kl=1e-3, data=data, candidates=FEW)
    made = copy.deepcopy(model)
    quantize_(made, found)
    assert kl_bits(model, made, data) <= 1.001e-3
    smaller = [u for u in found.uniform if u.bytes < found.bytes and u.measured is not None]
    assert all(u.measured > 1e-3 for u in smaller)


def test_the_answer_says_the_measure(model, data, with_logits):
    assert plan(model, bits=5.0, data=data).measure == "output"
    assert plan(with_logits(model), bits=5.0, data=data).measure == "kl"


def test_the_plan_keeps_what_was_measured(model, data):
    found = plan(model, bits=4.5, data=data, measure="kl")
    again = QuantizationPlan.from_json(found.to_json())
    assert again == found
    assert again.uniform == found.uniform
    assert again.checks == found.checks
    text = str(found)
    assert "one recipe for all:" in text
    assert "heads too" in text
    assert "agree in rank by" in text
    assert config_from_json(found.to_json()).entries == found.entries


def test_ranks():
    assert rank_correlation([(1, 1), (2, 4), (3, 9)]) == 1.0
    assert rank_correlation([(1, 9), (2, 4), (3, 1)]) == -1.0
    assert rank_correlation([(1, 1), (1, 2), (2, 2), (3, 3)]) == pytest.approx(5 / 6)
    assert rank_correlation([(1, 1), (2, 2)]) is None
