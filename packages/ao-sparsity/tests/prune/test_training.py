"""What prunes during training: movement scores, schedules, gradual pruning."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ao_core import FqnToConfig
from ao_core.ext import ConfigError
from ao_sparsity import (
    CubicSchedule,
    GradualPruning,
    LinearSchedule,
    Movement,
    NofM,
    OneShotSchedule,
    Rows,
    Unstructured,
    keep_masks,
    prune_wanda,
)


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_movement_adds_up_weight_times_gradient(model, data):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), 0.1)
    scores = torch.zeros(37, 52, dtype=torch.float64)
    with Movement(model, optimizer, lambda module, name: name == "0") as movement:
        for x in data:
            step(model, optimizer, x)
            weight = twin[0].weight.detach().double()
            step(twin, other, x)
            scores -= weight * twin[0].weight.grad.double()
    step(model, optimizer, data[0])  # counts no more
    assert list(movement.scores) == ["0.weight"]
    torch.testing.assert_close(movement.scores["0.weight"].double(), scores, rtol=1e-5, atol=1e-7)
    found = movement.prune(Unstructured(0.25))
    (record,) = found.report.with_status("pruned")
    assert record.removed == round(0.25 * 37 * 52)
    kept = found.masks["0.weight"]
    assert scores[kept].min() >= scores[~kept].max() - 1e-6
    assert scores[kept].abs().min() < scores[~kept].abs().max()  # the sign counts
    two_four = movement.prune(NofM(2, 4)).masks["0.weight"]
    assert bool((two_four.unflatten(1, (13, 4)).sum(-1) == 2).all())


def test_movement_needs_gradients_and_single_weights(model, data):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    movement = Movement(model, optimizer)
    (first, second) = movement.prune(Unstructured(0.5)).report.with_status("skipped")
    assert first.reason == second.reason == "no step of the optimizer had a gradient for it"
    with pytest.raises(ConfigError, match=r"pattern\['0'\]=rows 0.5: movement scores have signs"):
        movement.prune(FqnToConfig({"0": Rows(0.5)}))
    movement.close()
    step(model, optimizer, data[0])
    assert not movement.scores


@given(
    st.integers(0, 50), st.integers(1, 50), st.floats(0, 1), st.floats(0, 1), st.integers(0, 120)
)
def test_schedules_are_their_formulas(begin, length, a, b, step):
    initial, final = sorted((a, b))
    end = begin + length
    cubic = CubicSchedule(final, end, begin, initial)(step)
    linear = LinearSchedule(final, end, begin, initial)(step)
    if step <= begin:
        assert cubic == linear == pytest.approx(initial, abs=1e-12)
    elif step >= end:
        assert cubic == linear == final
    else:
        share = (step - begin) / length
        assert linear == pytest.approx(initial + (final - initial) * share, abs=1e-12)
        assert cubic == pytest.approx(final + (initial - final) * (1 - share) ** 3, abs=1e-12)
        assert linear <= cubic + 1e-12
    assert OneShotSchedule(final, end)(step) == (final if step >= end else 0)


def test_gradual_pruning_reaches_its_end(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = CubicSchedule(0.8, end=11, begin=2)
    pruning = GradualPruning(model, Unstructured(0.8), schedule, every=4)
    sparsities = []
    with keep_masks(model, optimizer):
        for number in range(1, 15):
            step(model, optimizer, data[number % len(data)])
            report = pruning.step()
            assert (report is not None) == (number in (4, 8, 11))
            sparsities.append(float((model[0].weight == 0).double().mean()))
    expected = [schedule(8) if n < 11 else 0.8 for n in range(8, 15)]
    assert sparsities[7:] == pytest.approx(expected, abs=1e-3)
    assert sparsities[:3] == [0, 0, 0]
    assert pruning.sparsity == 0.8


def test_gradual_pruning_goes_on_from_a_checkpoint(model, data):
    """Half of the steps, then a new callback: the same masks as in one go."""
    schedule = LinearSchedule(0.6, end=8)
    whole, halves = copy.deepcopy(model), copy.deepcopy(model)
    pruning = GradualPruning(whole, NofM(1, 4), schedule)
    for _ in range(8):
        pruning.step()
    first = GradualPruning(halves, NofM(1, 4), schedule)
    for _ in range(4):
        first.step()
    second = GradualPruning(halves, NofM(1, 4), schedule)
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        second.step()
    assert torch.equal(halves[0].weight_sparsity_mask, whole[0].weight_sparsity_mask)
    kept = halves[0].weight_sparsity_mask.unflatten(1, (13, 4)).sum(-1)
    assert bool((kept == 2).all())  # 0.6 of 4, rounded, is 2


def test_other_methods(model, data):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    movement = Movement(model, optimizer)
    schedule = OneShotSchedule(0.5, end=2)
    methods = (movement.prune, lambda pattern: prune_wanda(model, data, pattern))
    reports = []
    for method in methods:
        pruning = GradualPruning(model, NofM(2, 4), schedule, method=method)
        for _ in range(2):
            step(model, optimizer, data[0])
            reports.append(pruning.step())
    assert [report and report.method for report in reports] == [None, "movement", None, "wanda"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: OneShotSchedule(1.5, 3), "final=1.5"),
        (lambda m: LinearSchedule(0.5, 3, begin=3), "begin=3, end=3"),
        (lambda m: CubicSchedule(0.5, 3, initial=0.6), "initial=0.6"),
        (lambda m: GradualPruning(m, 0.5, OneShotSchedule(0.5, 3)), "pattern=0.5"),
        (lambda m: GradualPruning(m, NofM(), OneShotSchedule(0.5, 3), every=0), "every=0"),
    ],
)
def test_values_that_cannot_be(make, message, model):
    with pytest.raises(ConfigError, match=message):
        make(model)


def test_layers_outside_the_optimizer_stay_as_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    model[0].requires_grad_(False)
    with Movement(model, optimizer) as movement:
        step(model, optimizer, torch.randn(5, 8))
    assert list(movement.scores) == ["1.weight"]
