"""A model whose weights differ in what they can bear, and inputs for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Model(nn.Module):
    """A tied head, a norm, a buffer, a convolution, and layers whose weights differ in their tails."""

    def __init__(self, width: int = 72) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("größe", torch.ones(3, dtype=torch.complex128))
        self.register_buffer("temporary", torch.ones(1000), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.embed.weight *= 0.1
        model.up.weight.copy_(torch.distributions.StudentT(3.0).sample(model.up.weight.shape) * 0.1)
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(1))
