"""What the tests share: parameters with the same values in every run, and gradients for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core.testing.base import gaussian


@pytest.fixture
def make_params():
    """(shapes, dtype) -> parameters of normal values."""

    def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(gaussian(s, seed=i).to(dtype)) for i, s in enumerate(shapes)]

    return make


@pytest.fixture
def give_grads():
    """(parameters, number of the step): set gradients that differ from step to step."""

    def give(params: list[nn.Parameter], step: int) -> None:
        for i, p in enumerate(params):
            p.grad = gaussian(tuple(p.shape), seed=1000 * step + i).to(p.dtype)

    return give


@pytest.fixture
def run_steps(give_grads):
    """(optimizer, parameters, number of steps, first one): take steps with `give_grads`."""

    def run(optimizer, params, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            give_grads(params, step)
            optimizer.step()

    return run
