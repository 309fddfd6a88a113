"""A model of blocks, and a visit whose result depends on every bit of what it sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ao_core.calibration.inputs import batches_of
from ao_core.calibration.statistics import HESSIAN
from ao_core.calibration.visit import Inputs, Visit, visit
from ao_core.config import Config
from ao_core.targets import Decision, decide


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 11), nn.GELU(), nn.Linear(11, dim))
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        self.calls += 1
        h = self.norm(x)
        x = x + self.o(torch.softmax(self.q(h) @ self.k(h).mT * scale + mask, -1) @ self.v(h))
        return x + self.mlp(self.norm(x)), None


class Model(nn.Module):
    """Blocks between an embedding and a head; two kinds of masks, made once."""

    def __init__(self, depth: int = 3, dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(5, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 4)

    def between(self, number: int, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        masks = [x.new_full((x.shape[-2],) * 2, -1e4).triu(offset) for offset in (1, 2)]
        for number, layer in enumerate(self.layers):
            x = layer(self.between(number, x), masks[number % 2], scale=0.5)[0]
        return self.head(x)


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, n, 5).to(dtype) for n in (7, 3, 4)]


def decisions(model: nn.Module) -> list[Decision]:
    return [entry for entry in decide(model, Config(), None) if entry.config is not None]


def shrink(entry: Decision, inputs: Inputs) -> Tensor:
    """New values that depend on every bit of the Hessian."""
    hessian, weight = inputs.statistics[0]["hessian"], entry.tensor.detach()
    factor = 0.5 + torch.sigmoid(hessian.sum(0) / (1 + hessian.trace()))
    return (weight.double() * factor).to(weight.dtype)


def visited(model: nn.Module, data: list[Tensor], **options: object) -> Visit:
    found = batches_of(data, "a test")
    return visit(model, found, decisions(model), lambda entry: (HESSIAN,), shrink, **options)  # type: ignore[arg-type]


def equal(a: Visit, b: Visit) -> bool:
    same = all(torch.equal(a.values[name], b.values[name]) for name in a.values)
    return same and a.values.keys() == b.values.keys() and a.rows == b.rows and bool(a.values)
