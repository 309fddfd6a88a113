from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ao_core import quantize_
from ao_core.ext.numerics import sqnr


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def run():
    """(layer, x, gradient) -> output, gradient of the input and of the weight."""

    def matmuls(layer: nn.Module, x: Tensor, grad: Tensor, *args) -> list[Tensor]:
        x = x.clone().requires_grad_()
        layer.zero_grad()
        out = layer(x, *args)
        out.backward(grad)
        (weight,) = [p for p in layer.parameters() if p.dim() > 1]
        assert x.grad is not None
        assert weight.grad is not None
        return [out.detach(), x.grad, weight.grad]

    return matmuls


@pytest.fixture
def decibels(run):
    """(configuration, K, N, rows) -> SQNR of the three matmuls in bfloat16 to float32 autograd."""

    def measured(config, k: int, n: int, rows: int) -> list[float]:
        layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        exact = copy.deepcopy(layer).float()
        quantize_(layer, config, strict=True)
        x = torch.randn(rows, k, dtype=torch.bfloat16)
        grad = torch.randn(rows, n, dtype=torch.bfloat16)
        expected = run(exact, x.float(), grad.float())
        return [
            float(sqnr(a, b.float())) for a, b in zip(expected, run(layer, x, grad), strict=True)
        ]

    return measured
