"""What the tests share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core.testing.base import gaussian


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def make_layer():
    """(class or partial of one, (in, out), dtype) -> a layer of it with normal weights."""

    def make(kind, sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> nn.Linear:
        columns, rows = sizes
        dense = nn.Linear(columns, rows, dtype=dtype)
        with torch.no_grad():
            dense.weight.copy_(gaussian((rows, columns), seed=0))
            dense.bias.copy_(gaussian((rows,), seed=1))
        cls, options = getattr(kind, "func", kind), getattr(kind, "keywords", {})
        return cls.from_dense(dense, **options)

    return make
