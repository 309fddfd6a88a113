"""Seeing what weights are multiplied with, and running models with other parameters for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core.calibration.observing import observing
from ao_core.calibration.samples import answer, replaced, tensor_of
from ao_core.errors import ConfigError, QuantizationError
from ao_core.records import Target


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.layer(x) + x @ self.layer.weight.T + self.other(x)
        return self.attention(x, x, x)


def test_matmuls_are_seen_wherever_they_are_made():
    model, x = Model(), torch.randn(2, 3, 6)
    watched = ["layer.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    seen: list[tuple[str, torch.Tensor]] = []
    with observing(
        [(name, model.get_parameter(name)) for name in watched],
        lambda name, number, x: seen.append((name, x.detach().clone())),
    ):
        model(x)
    names = [name for name, _ in seen]
    assert names.count("layer.weight") == 2
    assert set(names) == set(watched)
    for name, rows in seen[:2]:
        assert name == "layer.weight"
        assert torch.equal(rows.reshape(-1, 6), x.reshape(-1, 6))
    count = len(seen)
    model(x)  # outside of the context
    assert len(seen) == count


def test_the_other_matmul_with_a_square_matrix_is_not_its_own():
    """x @ w multiplies the rows of w, whose inputs are columns; unless it is stored so."""
    w, x = torch.randn(6, 6), torch.randn(2, 6)
    seen: list[str] = []
    for name, weight in (("plain", w), ("turned", w.t())):
        with observing([(name, weight)], lambda name, number, x: seen.append(name)):
            x @ w
            assert seen == (["turned"] if name == "turned" else [])
            x @ w.t()
            assert seen == (["turned"] if name == "turned" else ["plain"])
        seen.clear()


def test_parameters_are_replaced_for_a_while():
    model, x = Model().train(), torch.randn(2, 3, 6)
    before = model.other.weight
    target = Target("other.weight", model.other, "weight")
    right = answer(model, {"x": x})
    changed = answer(model, (x,), [([target], torch.zeros(6, 6))])
    assert model.other.weight is before
    assert model.training
    assert model.other.training
    assert not torch.equal(right, changed)
    assert torch.equal(right, answer(model, x))
    with replaced([([target], torch.zeros(6, 6))]):
        assert bool((model.other.weight == 0).all())
    with pytest.raises(RuntimeError, match="shapes"):
        answer(model, x, [([target], torch.zeros(6, 5))])
    assert model.other.weight is before


def test_answers_that_are_none():
    assert tensor_of({"a": (torch.ones(2), 3)}).tolist() == [1, 1]
    with pytest.raises(ConfigError, match="answers it with a int"):
        tensor_of((3,))
    with pytest.raises(QuantizationError, match="NaN or inf"):
        answer(nn.Linear(2, 2), torch.full((1, 2), float("nan")))
