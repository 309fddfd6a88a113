"""Budgets by sensitivity: what is measured, and that the allocation is the best of its kind."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ao_core.ext import ConfigError, QuantizationError
from ao_core.ext.calibration import answer
from ao_sparsity import (
    NofM,
    Sensitivity,
    Unstructured,
    apply_masks,
    prune_magnitude,
    prune_sparsegpt,
    sensitivity,
)
from ao_sparsity.prune import Curve


def test_errors_are_those_of_the_answer(model, data, same):
    unchanged = same(model.train())
    found = sensitivity(model, data[:2], Unstructured(0.0), levels=(0.5, 1.0))
    unchanged()
    assert [(c.fqn, c.weights, c.sparsities) for c in found.curves] == [
        ("0.weight", 37 * 52, (0, 0.5, 1)),
        ("2.weight", 19 * 37, (0, 0.5, 1)),
    ]
    dense = torch.cat([answer(model, x) for x in data[:2]]).double()
    for curve in found.curves:
        for level, error in zip((0.5, 1.0), curve.errors[1:], strict=True):
            pruned = copy.deepcopy(model)
            apply_masks(
                pruned,
                prune_magnitude(
                    pruned, Unstructured(level), lambda m, name, fqn=curve.fqn: fqn.startswith(name)
                ),
            )
            out = torch.cat([answer(pruned, x) for x in data[:2]]).double()
            expected = float((out - dense).square().sum() / dense.square().sum())
            assert error == pytest.approx(expected, rel=1e-6)


def test_errors_by_a_loss(model, data):
    def loss(model, x):
        return model(x).square().mean()

    found = sensitivity(model, data, Unstructured(0.0), levels=(1.0,), loss=loss)
    with torch.no_grad():
        before = sum(float(loss(model, x)) for x in data) / len(data)
        model[2].weight.zero_()
        after = sum(float(loss(model, x)) for x in data) / len(data)
    assert found.curves[1].errors == pytest.approx((0, after - before), rel=1e-6)


def test_by_another_method_and_in_groups(model, data):
    found = sensitivity(
        model,
        data[:1],
        NofM(2, 4),
        levels=(0.2, 0.25, 0.5),  # the first two are the same for groups of 4
        method=lambda pattern: prune_sparsegpt(model, data[:1], pattern),
    )
    assert found.curves[0].sparsities == (0, 0.25, 0.5)
    plain = sensitivity(model, data[:1], NofM(2, 4), levels=(0.25, 0.5))
    assert found.curves[0].errors[2] < plain.curves[0].errors[2]
    config = dict(found.allocate(0.4).entries)
    assert config["*"] is None
    assert {config[c.fqn].m for c in found.curves} == {4}


def test_everything_may_go():
    """Steps add up to no more than all, in whatever digits."""
    shares = (0.0, 0.1, 0.3, 0.7, 1.0)
    curves = tuple(Curve(str(n), n, shares, (0.0, 1.0, 4.0, 9.0, 20.0)) for n in range(1, 200))
    config = Sensitivity(Unstructured(0.0), curves).allocate(1.0)
    found = [each.sparsity for _, each in config.entries if each]
    assert found == pytest.approx([1.0] * 199, abs=1e-9)


@given(st.integers(1, 4), st.integers(1, 4), st.floats(0, 1), st.integers(0, 2**31 - 1))
def test_allocation_is_the_best_mixture(layers, levels, share, seed):
    """Against a linear program: levels of each parameter may be mixed, the sum of what goes is given."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(seed)
    curves = []
    for index in range(layers):
        weights = int(rng.integers(10, 1000))
        shares = np.unique(rng.random(levels))
        errors = rng.random(len(shares))  # in any order
        values = (0.0, *map(float, errors))
        curves.append(Curve(str(index), weights, (0.0, *map(float, shares)), values))
    found = Sensitivity(Unstructured(0.0), tuple(curves))
    total = sum(c.weights for c in curves)
    most = sum(c.weights * c.sparsities[-1] for c in curves)
    sparsity = share * most / total
    chosen = dict(found.allocate(sparsity).entries)
    gone = [chosen[c.fqn].sparsity * c.weights for c in curves]
    assert sum(gone) == pytest.approx(sparsity * total, abs=1e-6)
    mixture = sum(
        np.interp(
            chosen[c.fqn].sparsity,
            [c.sparsities[j] for j in c.hull()],
            [c.errors[j] for j in c.hull()],
        )
        for c in curves
    )
    options = [
        (i, c.weights * s / total, e)
        for i, c in enumerate(curves)
        for s, e in zip(c.sparsities, c.errors, strict=True)
    ]
    rows = [[float(i == layer) for i, _, _ in options] for layer in range(layers)]
    result = linprog(
        [e for _, _, e in options],
        A_eq=[*rows, [s for _, s, _ in options]],
        b_eq=[*[1.0] * layers, sparsity],
        method="highs",
    )
    assert mixture == pytest.approx(result.fun, abs=1e-6)


def test_a_budget_goes_where_it_costs_least(data):
    """A layer that the answer hardly depends on gives most of its weights."""
    model = nn.Sequential(nn.Linear(52, 40), nn.Linear(40, 40), nn.Linear(40, 20))
    with torch.no_grad():
        model[1].weight.mul_(1e-3).add_(torch.eye(40))
    found = sensitivity(model, data[:1], Unstructured(0.0), levels=(0.25, 0.5, 0.75, 0.95))
    pattern = found.allocate(0.6)
    shares = {key: each.sparsity for key, each in pattern.entries if each is not None}
    assert shares["1.weight"] == pytest.approx(0.95, abs=1e-3)
    dense = answer(model, data[1])
    errors = []
    for each in (Unstructured(0.6), pattern):
        pruned = copy.deepcopy(model)
        pruning = prune_magnitude(pruned, each)
        assert pruning.report.sparsity == pytest.approx(0.6, abs=2e-3)
        apply_masks(pruned, pruning)
        errors.append(float((answer(pruned, data[1]) - dense).norm()))
    assert errors[1] < 0.8 * errors[0]
    assert "0.95: " in str(found)
    assert "1.weight" in str(found)


def test_what_cannot_be_measured_or_allocated(model, data):
    found = sensitivity(model, data[:1], Unstructured(0.0), levels=(0.25, 0.5))
    with pytest.raises(
        ConfigError, match=r"sparsity=0\.6: the levels that were measured reach 0\.5"
    ):
        found.allocate(0.6)
    assert {c.sparsity for _, c in found.allocate(0.5).entries if c} == {0.5}
    with pytest.raises(ConfigError, match=r"sparsity=-0\.1"):
        found.allocate(-0.1)
    for levels in ((), (0.5, 0.25), (0.0, 0.5)):
        with pytest.raises(ConfigError, match="ascending sparsities above 0"):
            sensitivity(model, data, Unstructured(0.0), levels=levels)
    with pytest.raises(QuantizationError, match="NaN or inf"):
        sensitivity(model, [torch.full((1, 52), float("nan"))], Unstructured(0.0))
