"""PARQ: the map beside float64, its ends, and what is stored in the end."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ao_core import quantize_
from ao_core.ext import AoError, ConfigError
from ao_core.testing.base import gaussian
from ao_quant import NF4WeightOnlyConfig, UIntxWeightOnlyConfig
from ao_quant.qat import ProximalOptimizer, inverse_slope

BASE = UIntxWeightOnlyConfig(2, 32)


def test_slope() -> None:
    """A mirrored sigmoid of steepness 10, from 1 to 0 exactly."""
    assert [inverse_slope(share) for share in (-1.0, 0.0, 1.0, 2.0)] == [1.0, 1.0, 0.0, 0.0]
    assert inverse_slope(0.5) == pytest.approx(0.5)
    found = [inverse_slope(step / 10) for step in range(11)]
    assert found == sorted(found, reverse=True)

    def plain(at: float) -> float:
        return 1 / (1 + 2.718281828459045 ** (10 * (at - 0.5)))

    assert inverse_slope(0.3) == pytest.approx((plain(0.3) - plain(1)) / (plain(0) - plain(1)))


@pytest.mark.parametrize("mapping", ["parq", "relax"])
def test_map(mapping: str) -> None:
    """P = clamp(c + (u - c) / ρ) between neighbours with centre c, and (1 - ρ) q + ρ u, in float64."""
    layer = nn.Linear(64, 8, bias=False)
    optimizer = ProximalOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1), layer, BASE, end=10, mapping=mapping
    )
    start = layer.weight.detach().clone()
    by = gaussian((8, 64), seed=2) / 20
    for step in range(10):
        layer.weight.grad = by.clone()
        optimizer.step()
        u = (start.double() - 0.1 * (step + 1) * by.double()).float().double()
        torch.testing.assert_close(optimizer.latent["weight"].double(), u, rtol=1e-5, atol=1e-6)
        u = optimizer.latent["weight"].double()
        twin = nn.Linear(64, 8, bias=False)
        twin.weight.data.copy_(u)
        quantize_(twin, BASE)
        q = twin.weight.dequantize().double()  # type: ignore[operator]
        rho = inverse_slope((step + 1) / 10)
        relaxed = rho * u + (1 - rho) * q
        expected = relaxed if mapping == "relax" else _parq(u, twin.weight, rho)
        torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.weight, q.float())


def _parq(u: torch.Tensor, stored: torch.Tensor, rho: float) -> torch.Tensor:
    """Element by element, over the four levels of each group."""
    base = stored.canonical()  # type: ignore[attr-defined]
    scale = base.parts["scale"].double()
    zero = base.parts["zero_point"].double()
    out = u.clone()
    for n in range(u.shape[0]):
        for k in range(u.shape[1]):
            levels = [float((code - zero[n, k // 32]) * scale[n, k // 32]) for code in range(4)]
            value = float(u[n, k])
            inner = min(max(value, levels[0]), levels[-1])
            low = max(level for level in levels[:-1] if level <= inner + 1e-12)
            high = levels[levels.index(low) + 1]
            if rho == 0:
                out[n, k] = min((low, high), key=lambda level: abs(level - inner))
                continue
            centre = (low + high) / 2
            mapped = min(max(centre + (inner - centre) / rho, low), high)
            out[n, k] = mapped + rho * (value - inner)
    return out


def test_training_ends_on_the_grid_that_is_stored() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20))
    x, target = gaussian((32, 64), seed=1), gaussian((32, 20), seed=2)
    optimizer = ProximalOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2), model, BASE, end=30, start=5
    )
    other, losses = copy.deepcopy(model), []
    resumed = ProximalOptimizer(
        torch.optim.Adam(other.parameters(), lr=1e-2), other, BASE, end=30, start=5
    )
    for step in range(40):
        if step == 20:
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            other.load_state_dict(model.state_dict())
        for net, each in ((model, optimizer), (other, resumed)):
            if each is resumed and step < 20:
                continue
            each.zero_grad()
            loss = (net(x) - target).square().mean()
            loss.backward()
            each.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    trained, weight = model(x), model[0].weight.detach().clone()
    optimizer.store_latent_()
    assert not torch.equal(model[0].weight, weight)
    quantize_(model, BASE)
    assert torch.equal(model[0].weight.dequantize(), weight)  # type: ignore[operator]
    torch.testing.assert_close(model(x), trained, rtol=1e-4, atol=1e-4)


def test_what_is_refused() -> None:
    layer = nn.Linear(64, 8)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="mapping='hard'"):
        ProximalOptimizer(inner, layer, BASE, end=3, mapping="hard")
    with pytest.raises(ConfigError, match="start=3, end=3"):
        ProximalOptimizer(inner, layer, BASE, end=3, start=3)
    with pytest.raises(ConfigError, match="it has no weight that the base quantizes"):
        ProximalOptimizer(inner, nn.Linear(64, 8), BASE, end=3)
    with pytest.raises(ConfigError, match="no even steps; use mapping='relax'"):
        ProximalOptimizer(inner, layer, NF4WeightOnlyConfig(), end=3)
    made = ProximalOptimizer(inner, layer, NF4WeightOnlyConfig(), end=3, mapping="relax")
    with pytest.raises(AoError, match="not that of a ProximalOptimizer"):
        made.load_state_dict({"latent": {}})
