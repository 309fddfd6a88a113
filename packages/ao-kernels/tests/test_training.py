"""Weights in tiles where gradients are asked for: LoRA, autocast, inference mode, FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import repack
from ao_core.testing.programs import mesh_of_one

ROW = (1, WHOLE)
SPECS = {
    "int4": Spec("int4", (1, 32), layout="packed"),
    "uint4": Spec("uint4", (1, 32), "bfloat16", "int", "packed"),
    "nf4-double": Spec("nf4", (1, 32), Spec("f8e4m3", (WHOLE, WHOLE)), layout="packed"),
    "int8": Spec("int8", ROW),
    "f8e5m2": Spec("f8e5m2", ROW),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weight(name: str, n: int, k: int) -> QTensor:
    w = repack(quantize_tensor(randn(n, k), SPECS[name]))
    assert w.spec.layout.startswith("cpu_tiles")
    return w


class LoRA(nn.Module):
    """A frozen weight in tiles, and two small matrices that learn."""

    def __init__(self, w: QTensor, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Parameter(w, requires_grad=False)
        self.a = nn.Parameter(randn(rank, w.shape[1], seed=1) / 8)
        self.b = nn.Parameter(torch.zeros(w.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base) + F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("lead", [(1,), (5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_input_and_bias(name: str, lead: tuple[int, ...]) -> None:
    w = weight(name, 48, 80)
    x, bias = randn(*lead, 80).requires_grad_(), randn(48).requires_grad_()
    y, dense_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    toward = randn(*lead, 48, seed=3)
    (F.linear(x, w, bias) * toward).sum().backward()
    (F.linear(y, w.dequantize(), dense_bias) * toward).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias.grad, dense_bias.grad)


@pytest.mark.parametrize("name", SPECS)
def test_lora_learns_what_it_learns_over_dense_weights(name: str) -> None:
    w = weight(name, 48, 64)
    x, goal = randn(32, 64), randn(32, 48, seed=9)
    losses = []
    for base in (w, w.dequantize()):
        model = nn.Sequential(LoRA(base), nn.Tanh(), LoRA(weight("int4", 48, 48)))
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
        for _ in range(10):
            loss = F.mse_loss(model(x), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[9] < 0.9 * losses[0]
    assert losses[10:] == pytest.approx(losses[:10], rel=1e-3), losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    layer = LoRA(weight(name, 48, 64))
    x = randn(5, 64)
    with torch.autocast("cpu", dtype):
        out = F.linear(x, layer.base)
        assert out.dtype == dtype
        assert torch.equal(out, F.linear(x.to(dtype), layer.base))
        layer(x.requires_grad_()).float().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("name", SPECS)
def test_inference_mode(name: str) -> None:
    layer, x = LoRA(weight(name, 48, 64)), randn(5, 64)
    expected = layer(x).detach()
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
        made_inside = weight(name, 48, 64)
        assert torch.equal(F.linear(x, made_inside), F.linear(x, layer.base))
    assert torch.equal(F.linear(x, made_inside), F.linear(x, layer.base))
    assert torch.equal(layer(x), expected)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    with mesh_of_one(tmp_path) as mesh:
        yield mesh


@pytest.mark.parametrize("name", SPECS)
def test_fsdp2(name: str, mesh: object) -> None:
    """Weights that were in tiles shard, gather and compute as they do without this package."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(weight(name, *layer.weight.shape), requires_grad=False)
    x = randn(5, 64).requires_grad_()
    expected = model(x)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for _ in range(2):
        out = model(x)
        out.sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)  # of sums of about 100
