"""The measures of the example, by the byte model; and what the committed figures must say."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from statistics import median

import pytest
import torch
from advice import subjects
from advice.loss import answers, loss, nbytes, quantized
from advice.subjects import SUBJECTS, Subject

from ao_core import QTensor, quantize_

FOLDER = Path(__file__).parents[1]


@pytest.fixture
def subject():
    from bytelm import model

    windows = torch.randint(0, 256, (3, 1, 48), generator=torch.Generator().manual_seed(0))
    return Subject(model.load(), [windows[0]], list(windows[1:]), "kl", {})


def figures(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def test_a_divergence_is_that_of_the_definition(subject):
    right = answers(subject.model, subject.held_out)
    assert loss(subject, right, subject.model) == (0.0, 1.0)
    made = quantized(subject, "int4_weight_only")
    other = copy.deepcopy(subject.model)
    quantize_(other, "int4_weight_only")
    with torch.no_grad():
        p, q = (
            torch.cat([m(x) for x in subject.held_out]).double().log_softmax(-1)
            for m in (subject.model, other)
        )
    found = loss(subject, right, made)
    assert found.loss == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6)
    assert found.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert nbytes(made) < nbytes(subject.model) / 4
    assert not any(isinstance(x, QTensor) for x in subject.model.parameters())


def test_other_answers_are_compared_by_their_noise(subject):
    right = answers(subject.model, subject.held_out)
    other = copy.deepcopy(subject.model)
    with torch.no_grad():
        other.lm_head.weight *= 1.1
    found = loss(Subject(subject.model, [], subject.held_out, "output", {}), right, other)
    assert found.loss == pytest.approx(0.01, rel=1e-4)
    assert found.agreement is None


def test_nothing_is_judged_on_what_it_was_calibrated_on():
    """Of the models whose inputs are read within seconds."""
    for made in (subjects.bytelm(), subjects.minilm()):
        seen = {_key(sample) for sample in made.data}
        assert seen.isdisjoint(_key(sample) for sample in made.held_out)
        assert {*made.uses} == {"decode", "batch 8", "prefill"}


def _key(sample):
    tensors = sample.values() if isinstance(sample, dict) else [sample]
    return tuple(tuple(tensor.flatten().tolist()) for tensor in tensors)


def test_plans_are_better_than_recipes():
    """On inputs that no plan has seen: never worse, and a quarter better in the median."""
    found = figures("plans")["models"]
    assert found.keys() == SUBJECTS.keys()
    for name, model in found.items():
        ratios = []
        for row in model["plans"]:
            assert row["bytes"] <= row["budget"]
            fits = [r["loss"] for r in model["uniform"] if r["bytes"] <= row["budget"]]
            ratios += [row["loss"] / min(fits)] if fits else []
        assert len(model["plans"]) == 8
        assert max(ratios) <= 1.0, name
        assert median(ratios) <= 0.75, name
