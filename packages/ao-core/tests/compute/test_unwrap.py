"""Back from weights that compute in low precision to ordinary parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import WHOLE, ComputeWeight, Spec
from ao_core.compute.unwrap import unwrap_
from ao_core.errors import ConfigError
from ao_core.tensor.wrapper import dense_memory

ROWS = Spec("int8", (1, WHOLE), act=Spec("int8", (1, WHOLE)))


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 3))
    shared = nn.Parameter(ComputeWeight(made[0].weight.detach(), ROWS))
    made[0].weight = made[2].weight = shared
    made[3].weight = nn.Parameter(ComputeWeight(made[3].weight.detach(), ROWS), requires_grad=False)
    return made


def test_values_ties_and_gradients_are_kept() -> None:
    made = model()
    before = {name: dense_memory(t).clone() for name, t in made.state_dict().items()}
    address = made[0].weight.memory.data_ptr()
    assert unwrap_(made) == ["0.weight", "2.weight", "3.weight"]
    assert made[0].weight is made[2].weight
    assert type(made[0].weight) is nn.Parameter
    assert made[0].weight.data_ptr() == address
    assert made[0].weight.requires_grad
    assert not made[3].weight.requires_grad
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    x = torch.randn(2, 24)
    hidden = made[0](x)
    assert torch.allclose(hidden, x @ before["0.weight"].T + before["0.bias"], atol=1e-6)
    assert "int8" not in repr(made)
    assert unwrap_(made) == []


def test_a_weight_with_further_tensors_is_refused() -> None:
    made = model()
    made[3].extra_names = ("scale",)
    made[3].weight_scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"3\.weight computes with further tensors \(scale\)"):
        unwrap_(made)
    assert isinstance(made[0].weight, ComputeWeight)
