"""Qronos: weights that are fitted to the inputs of quantized layers, against least squares, then GPTQ."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ao_core import QTensor, quantize_
from ao_core.ext.calibration import CROSS, HESSIAN, Statistics
from ao_quant import GPTQConfig, IntxWeightOnlyConfig, QronosConfig
from ao_quant.algorithms.hessian import fitted

BASE = IntxWeightOnlyConfig(bits=3, group_size=32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net(depth: int = 3) -> nn.Module:
    """Blocks after a layer whose errors all of them see."""
    return nn.Sequential(
        nn.Linear(64, 64), *(Block() for _ in range(depth)), nn.Linear(64, 16)
    ).eval()


def codes(model: nn.Module) -> list[Tensor]:
    found = [p.canonical() for p in model.parameters() if isinstance(p, QTensor)]
    return [tensor.parts["qdata"] for tensor in found]


@pytest.mark.parametrize("damping", [1e-9, 0.01, 1.0])
def test_the_fit_is_the_least_squares_solution(damping: float) -> None:
    """Of ‖W x̃ - V x‖² + λ ‖W - V‖², whose last term is rows more of √λ times the unit matrix."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(60, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    was, weight = x + 0.3 * noise, torch.randn(5, 9, dtype=torch.float64, generator=generator)
    hessian = x.t() @ x
    found, used = fitted(weight, hessian, was.t() @ x, damping)
    assert used == damping
    share = (damping * hessian.diagonal().mean()).sqrt() * torch.eye(9, dtype=torch.float64)
    wanted = torch.linalg.lstsq(torch.cat([x, share]), torch.cat([was, share]) @ weight.t())
    torch.testing.assert_close(found, wanted.solution.t(), rtol=1e-9, atol=1e-9)


def test_inputs_that_nothing_has_changed_make_it_gptq() -> None:
    x = torch.randn(200, 64)
    seen = Statistics((HESSIAN, CROSS)).add(x, x)
    weight = torch.randn(8, 64)
    same, _ = fitted(weight, seen["hessian"], seen["hessian"], 0.01)
    assert torch.equal(same, weight.double())
    dense, data = nn.Sequential(nn.Linear(64, 16)).eval(), [x]
    models = [copy.deepcopy(dense) for _ in range(2)]
    for model, config in zip(models, (GPTQConfig(BASE), QronosConfig(BASE)), strict=True):
        quantize_(model, config, data=data)
    assert all(torch.equal(a, b) for a, b in zip(*map(codes, models), strict=True))


def test_outputs_are_nearer_than_those_of_gptq() -> None:
    """On data that it was not calibrated with; the first layer of the model is that of GPTQ."""
    dense, mix = net(), torch.eye(64) + torch.randn(64, 64) / 6
    data, other = [torch.randn(256, 64) @ mix for _ in range(6)], torch.randn(2048, 64) @ mix
    errors, first = [], []
    for config in (GPTQConfig(BASE), QronosConfig(BASE)):
        model = copy.deepcopy(dense)
        report = quantize_(model, config, data=data)
        first.append(codes(model)[0])
        with torch.no_grad():
            errors.append(float((model(other) - dense(other)).square().mean()))
    assert torch.equal(*first)
    assert 0.2 < errors[1] / errors[0] < 0.85
    notes = {record.fqn: record.note for record in report if record.status == "changed"}
    assert notes["0.weight"] == ""
    assert "fitted to the inputs of quantized layers" in notes["3.down.weight"]


class Routed(nn.Module):
    """Experts that a weight before them chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        chosen, out = x[:, 0] > 0, x.clone()
        for rows, expert in zip((chosen, ~chosen), self.experts, strict=True):
            out[rows] = expert(x[rows])
        return out


def test_experts_that_see_other_rows_are_rounded_by_gptq() -> None:
    dense, data = Routed().eval(), [torch.randn(300, 64) for _ in range(2)]
    found = []
    for config in (GPTQConfig(BASE), QronosConfig(BASE)):
        model = copy.deepcopy(dense)
        report = quantize_(model, config, data=data)
        found.append(codes(model))
    notes = {record.fqn: record.note for record in report}
    assert "which chose other experts: by GPTQ" in notes["experts.0.weight"]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
