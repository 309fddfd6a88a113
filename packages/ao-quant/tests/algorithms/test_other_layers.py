"""Weights that are stored as (in, out), that an embedding shares, and inputs that several weights share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ao_core import Config, FqnToConfig, QTensor, quantize_
from ao_core.ext.calibration import HESSIAN, Inputs, Statistic, Statistics, batches_of, visit
from ao_core.ext.quantizing import Decision, decide
from ao_quant import (
    AutoRoundConfig,
    GPTQConfig,
    Int8DynamicActivationInt4WeightConfig,
    IntxWeightOnlyConfig,
    LowRankConfig,
    QronosConfig,
)

BASE = IntxWeightOnlyConfig(bits=3, group_size=32)


class Conv1D(nn.Module):
    """As in transformers: `y = x W + b` with W (in, out)."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().t().contiguous())
        self.bias = nn.Parameter(like.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


@pytest.mark.parametrize(
    "config",
    [
        GPTQConfig(BASE),
        QronosConfig(BASE),
        AutoRoundConfig(BASE, iterations=6, bfloat16=False),
        [LowRankConfig(rank=4), GPTQConfig(BASE)],
        [LowRankConfig(rank=4), Int8DynamicActivationInt4WeightConfig()],
    ],
    ids=str,
)
def test_a_weight_that_is_stored_transposed_is_that_of_a_linear_layer(config: object) -> None:
    layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
    turned = nn.Sequential(Conv1D(layers[0]), nn.ReLU(), Conv1D(layers[2])).eval()
    data = [torch.randn(4, 40, 64) @ (torch.eye(64) + torch.randn(64, 64) / 6) for _ in range(2)]
    reports = [quantize_(model, config, data=data) for model in (layers, turned)]
    assert [r.status for r in reports[1]] == [r.status for r in reports[0]]
    for place in (0, 2):
        weights = layers[place].weight, turned[place].weight
        assert all(isinstance(weight, QTensor) for weight in weights)
        torch.testing.assert_close(weights[1].t().dequantize(), weights[0].dequantize())
    with torch.no_grad():
        torch.testing.assert_close(turned(data[0]), layers(data[0]), rtol=1e-4, atol=1e-4)


class Tied(nn.Module):
    """Tokens in, logits out, by one matrix: a module that has it, or its transpose in a function."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(50, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False) if module else None
        if self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embed(ids)))
        return x @ self.embed.weight.t() if self.head is None else self.head(x)


@pytest.mark.parametrize("module", [True, False])
def test_a_matrix_that_is_also_looked_up(module: bool) -> None:
    """Its Hessian is that of what it is multiplied with; lookups read the same codes."""
    model, data = Tied(module).eval(), [torch.randint(0, 50, (4, 60)) for _ in range(3)]
    dense = copy.deepcopy(model)
    report = quantize_(model, FqnToConfig({"embed": GPTQConfig(BASE)}), data=data)
    record = next(record for record in report if record.fqn == "embed.weight")
    assert (record.status, record.rows) == ("changed", 720)
    assert 0.1 < record.error_vs_rtn < 0.9
    assert isinstance(model.embed.weight, QTensor)
    assert module == (model.head is not None and model.head.weight is model.embed.weight)
    with torch.no_grad():
        looked_up = F.embedding(data[0], model.embed.weight)
        assert torch.equal(looked_up, model.embed.weight.dequantize()[data[0]])
        change = (model(data[0]) - dense(data[0])).norm() / dense(data[0]).norm()
    assert 0.001 < float(change) < 0.5


def test_what_is_only_looked_up_says_so() -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 8)).eval()
    config = FqnToConfig({"0": GPTQConfig(BASE), "1": GPTQConfig(BASE)})
    report = quantize_(model, config, data=[torch.randint(0, 50, (4, 60))])
    reasons = {record.fqn: record.reason for record in report}
    assert reasons["0.weight"] == "a lookup multiplies nothing"
    assert isinstance(model[1].weight, QTensor)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).mT, -1)
        x = x + self.o(scores @ self.v(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_weights_of_the_same_inputs_share_a_hessian() -> None:
    """It is computed once for q, k and v, and once for gate and up, of each batch."""
    counted: list[int] = []

    def of(rows: Tensor, before: int) -> dict[str, Tensor]:
        counted.append(len(rows))
        return dict(HESSIAN.of(rows, before))

    counting = Statistic("hessian", ("hessian",), of, HESSIAN.merge)
    model, data = nn.Sequential(Attention(), Attention()).eval(), [torch.randn(2, 9, 32)] * 3
    entries = [each for each in decide(model, Config(), None) if each.config is not None]
    seen: dict[str, Statistics] = {}

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        seen[entry.fqn] = inputs.statistics[0]
        return entry.tensor.detach() * 0.9

    visit(model, batches_of(data, "a test"), entries, lambda _: (counting,), rewrite)
    assert len(seen) == 14
    assert len(counted) == 2 * 4 * 3  # blocks, kinds of inputs, batches
    assert seen["0.q.weight"] is seen["0.k.weight"] is seen["0.v.weight"]
    assert seen["0.gate.weight"] is seen["0.up.weight"]
    assert seen["0.o.weight"] is not seen["0.down.weight"]
