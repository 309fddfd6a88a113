"""What goes wrong without an error is said once: weights that cannot move, scales that no optimizer has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ao_core import ComputeWeight, quantize_
from ao_core.ext import ConfigError
from ao_core.ext.compute import TrainingWarning
from ao_core.testing.base import gaussian
from ao_quant import Int4WeightOnlyConfig, QATConfig

INT4 = Int4WeightOnlyConfig(32)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20)).to(dtype)


def train(made: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """What is said in so many steps."""
    x = gaussian((16, 64), seed=1).to(next(made.parameters()).dtype)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            made(x).float().square().mean().backward()
            optimizer.step()
    return [str(each.message) for each in said if issubclass(each.category, TrainingWarning)]


@pytest.mark.parametrize(
    ("dtype", "lr", "is_said"),
    [(torch.bfloat16, 1e-5, True), (torch.bfloat16, 1e-2, False), (torch.float32, 1e-5, False)],
    ids=["small steps", "large steps", "float32"],
)
def test_weights_that_cannot_move(dtype: torch.dtype, lr: float, is_said: bool) -> None:
    made = model(dtype)
    quantize_(made, QATConfig(INT4))
    said = train(made, torch.optim.Adam(made.parameters(), lr=lr), 20)
    assert len(said) == is_said
    if is_said:
        assert "weight: " in said[0]
        assert "in bfloat16 did not move in 8 steps of about 1e-05" in said[0]
        assert "Keep weights in float32" in said[0]
        assert "rounding='stochastic'" in said[0]


def test_an_optimizer_from_before_learned_scales() -> None:
    made = model()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-3)
    quantize_(made, QATConfig(INT4, scales="learned"))
    assert train(made, optimizer, 1) == []
    (said,) = train(made, optimizer, 3)
    assert "an optimizer steps it, and not weight_scale, weight_offset beside it" in said
    # made after preparing, or with scales that are frozen, nothing is said
    other = model()
    quantize_(other, QATConfig(INT4, scales="learned"))
    assert train(other, torch.optim.Adam(other.parameters(), lr=1e-3), 3) == []
    frozen = model()
    optimizer = torch.optim.Adam(frozen.parameters(), lr=1e-3)
    quantize_(frozen, QATConfig(INT4, scales="learned"))
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("weight_" not in name)
    assert train(frozen, optimizer, 3) == []


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0, float("inf")])
@pytest.mark.parametrize(
    ("scales", "extra", "named"),
    [("learned", "scale", "scales"), ("clipped", "clip_low", "clipping factors")],
)
def test_what_became_of_no_use_is_named(value: float, scales: str, extra: str, named: str) -> None:
    """With the state of the training intact, so that it can go on from a checkpoint."""
    made: Any = model()
    quantize_(made, QATConfig(INT4, scales=scales))
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-3)
    train(made, optimizer, 2)
    broken = getattr(made[2], f"weight_{extra}")
    before = broken.detach().clone()
    broken.data[0, 0] = value
    state = {name: p.detach().clone() for name, p in made.state_dict().items()}
    with pytest.raises(ConfigError, match=rf"2\.weight: its learned {named} go from"):
        quantize_(made, QATConfig(INT4, "convert", scales))
    assert all(isinstance(made[i].weight, ComputeWeight) for i in (0, 2))
    for name, now in made.state_dict().items():
        assert torch.equal(now.nan_to_num(), state[name].nan_to_num()), name
    broken.data.copy_(before)
    assert train(made, optimizer, 2) == []
    quantize_(made, QATConfig(INT4, "convert", scales))
