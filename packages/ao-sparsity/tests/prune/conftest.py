from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def model():
    """Two linear layers of odd sizes."""
    return nn.Sequential(nn.Linear(52, 37), nn.ReLU(), nn.Linear(37, 19)).eval()


@pytest.fixture
def data():
    """Batches of correlated inputs, some features much larger than others."""
    scales = torch.logspace(0.5, -1, 52)[torch.randperm(52)]
    mix = scales[:, None] * torch.randn(52, 52) * torch.logspace(0, -1.5, 52)
    return [torch.randn(64, 52) @ mix.T for _ in range(6)]


@pytest.fixture
def same():
    """(model) -> what checks that it has the parameters that it had, object by object."""

    def remember(model):
        before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
        training = model.training

        def check():
            assert dict(model.named_parameters()).keys() == before.keys()
            for name, p in model.named_parameters():
                assert p is before[name][0], name
                assert torch.equal(p, before[name][1]), name
            assert model.training == training
            assert not list(model.buffers())

        return check

    return remember
