"""`ComputeWeight`: three low-precision matmuls around high-precision memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ao_core import WHOLE, ComputeWeight, Spec
from ao_core.numerics import sqnr
from ao_core.tensor import fake_quantize

ROW = Spec("f8e4m3", (1, WHOLE))
GRAD = Spec("f8e5m2", (1, WHOLE))
OUTPUT, BACKWARD = replace(ROW, act=ROW), replace(ROW, act=GRAD)


def _layers(*specs: Spec | None) -> tuple[nn.Linear, nn.Linear]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dense = nn.Linear(70, 48)
    low = copy.deepcopy(dense)
    low.weight = nn.Parameter(ComputeWeight(low.weight.detach(), *specs))
    return dense, low


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(1))


def _run(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * y).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_each_matmul_is_the_cast_matmul(x: Tensor) -> None:
    dense, low = _layers(OUTPUT, BACKWARD, BACKWARD)
    y, grad_x = _run(low, x)
    w, flat = dense.weight.detach(), x.reshape(-1, 70)
    expected = fake_quantize(flat, ROW) @ fake_quantize(w, ROW).t() + dense.bias
    torch.testing.assert_close(y.reshape(-1, 48), expected)
    grad = 2 * y.reshape(-1, 48)
    # the contracted dimension is the last one of both operands: rows of N for the input's gradient
    expected = fake_quantize(grad, GRAD) @ fake_quantize(w.t(), ROW).t()
    torch.testing.assert_close(grad_x.reshape(-1, 70), expected)
    expected = fake_quantize(grad.t(), GRAD) @ fake_quantize(flat.t(), ROW).t()
    torch.testing.assert_close(low.weight.grad, expected)
    assert type(low.weight.grad) is Tensor


def test_low_precision_within_bounds(x: Tensor) -> None:
    dense, low = _layers(OUTPUT, BACKWARD, BACKWARD)
    (y, grad_x), (y_low, grad_x_low) = _run(dense, x), _run(low, x)
    assert 25 < sqnr(y, y_low) < 35
    assert 20 < sqnr(grad_x, grad_x_low) < 30
    assert 20 < sqnr(dense.weight.grad, low.weight.grad) < 30


def test_matmuls_without_a_spec_are_exact(x: Tensor) -> None:
    dense, low = _layers(None)
    for mine, theirs in zip(_run(low, x), _run(dense, x), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(low.weight.grad, dense.weight.grad)


@pytest.mark.slow
def test_compiled_is_eager(x: Tensor) -> None:
    _, low = _layers(OUTPUT, BACKWARD, BACKWARD)
    y, grad_x = _run(low, x)
    grad_w = low.weight.grad.clone()
    low.zero_grad()
    compiled = torch.compile(low, fullgraph=True)
    for mine, theirs in zip(_run(compiled, x), (y, grad_x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(low.weight.grad, grad_w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_optimizers_step(x: Tensor, options: dict[str, bool]) -> None:
    _, low = _layers(OUTPUT, BACKWARD, BACKWARD)
    optimizer = torch.optim.AdamW(low.parameters(), lr=1e-2, **options)
    target = torch.zeros(2, 5, 48)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(low(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(low.weight, ComputeWeight)


def test_state_is_plain_in_use_and_safe_to_load(x: Tensor, tmp_path: Path) -> None:
    dense, low = _layers(OUTPUT, BACKWARD, BACKWARD)
    torch.save(low.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = copy.deepcopy(low)
    nn.init.zeros_(other.weight)
    other.load_state_dict(state)
    assert torch.equal(other(x), low(x))
    dense.load_state_dict(state)
    assert type(dense.weight) is nn.Parameter


def test_moves_and_converts(x: Tensor) -> None:
    _, low = _layers(OUTPUT, BACKWARD, BACKWARD)
    half = copy.deepcopy(low).bfloat16()
    assert isinstance(half.weight, ComputeWeight)
    assert half.weight.dtype == half.weight.memory.dtype == torch.bfloat16
    y = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert 20 < sqnr(low(x), y) < 40
    with torch.autocast("cpu", torch.bfloat16):
        assert low(x).dtype == torch.bfloat16


def test_repr_names_the_casts() -> None:
    _, low = _layers(OUTPUT)
    assert "f8e4m3" in repr(low.weight)
