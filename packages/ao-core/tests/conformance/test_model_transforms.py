"""`ModelTransformSuite` passes for a correct transform, and fails for each with one defect."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from ao_core import Config, ModelTransform, Prepared
from ao_core.errors import AoError
from ao_core.graph.copies import sharing
from ao_core.steps import hadamard_step
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.testing import ModelTransformSuite
from ao_core.testing.base import run
from ao_core.testing.registered import registered


@dataclass(frozen=True)
class Doubled(Config):
    """Gains of the second norm are doubled, and what reads them is halved."""


def changed(model, **factors):
    made = sharing(model)
    for name, factor in factors.items():
        module = made.get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight.detach() * factor, requires_grad=False)
    return made


NOTES = {"up.weight": "halved, since its inputs are doubled", "gate.weight": "halved with up"}


def double(model, weights, batches, config):
    step = ChosenSteps((hadamard_step(16),))
    return Prepared(changed(model, two=2.0, up=0.5, gate=0.5), {"down.weight": step}, NOTES)


def in_place(model, weights, batches, config):
    for name, factor in (("two", 2.0), ("up", 0.5), ("gate", 0.5)):
        model.get_submodule(name).weight.mul_(factor)
    return Prepared(model, {}, NOTES)


def draws(model, weights, batches, config):
    torch.rand(1)
    return double(model, weights, batches, config)


COUNT = [0]


def at_random(model, weights, batches, config):
    COUNT[0] += 1
    factor = 2.0 ** COUNT[0]
    return Prepared(changed(model, two=factor, up=1 / factor, gate=1 / factor), {}, NOTES)


def with_steps(name, block):
    steps = {name: ChosenSteps((hadamard_step(block),))}
    return lambda m, w, b, c: Prepared(m, steps, NOTES)


#: defect -> (the function, the test that fails, its message)
BROKEN = {
    "forgets a reader": (
        lambda m, w, b, c: Prepared(changed(m, two=2.0, up=0.5), {}, NOTES),
        "test_the_model_computes_the_same",
        r"changes what the model computes: data\[0\] differs",
    ),
    "changes parameters": (in_place, "test_inputs_are_left_alone", "changes two.weight in place"),
    "draws": (draws, "test_inputs_are_left_alone", "changed torch's random numbers"),
    "differs each time": (at_random, "test_inputs_are_left_alone", "other values of"),
    "steps of no weight": (
        with_steps("two.weight", 16), "test_steps_and_notes", "'two.weight', which is no weight",
    ),
    "steps that do not fit": (
        with_steps("up.weight", 12), "test_steps_and_notes", "the steps of up.weight",
    ),
    "a note on nothing": (
        lambda m, w, b, c: Prepared(m, {}, {"middle.weight": "it was doubled there"}),
        "test_steps_and_notes",
        "'middle.weight', which is no parameter",
    ),
    "a word": (
        lambda m, w, b, c: Prepared(m, {}, {"up.weight": "halved"}),
        "test_steps_and_notes",
        "is no sentence: 'halved'",
    ),
    "says nothing": (lambda m, w, b, c: Prepared(m), "test_quantized", "says nothing of what"),
    "another answer": (lambda m, w, b, c: m, "test_steps_and_notes", "answer Prepared"),
}  # fmt: skip

TESTS = [name for name in dir(ModelTransformSuite) if name.startswith("test_")]
RECORD = ModelTransform("doubled", Doubled, double)


@pytest.mark.parametrize("test", TESTS)
def test_a_correct_one_passes(test):
    with registered(RECORD):
        run(type("Suite", (ModelTransformSuite,), {"config": Doubled()}), test)


@pytest.mark.parametrize("defect", BROKEN)
def test_broken(defect):
    apply, test, match = BROKEN[defect]
    suite = type("Suite", (ModelTransformSuite,), {"config": Doubled()})
    broken = replace(RECORD, apply=apply)
    with registered(broken), pytest.raises((AssertionError, AoError), match=match):
        run(suite, test)
