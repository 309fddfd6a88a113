"""One rank of test_ranks.py: a model that is calibrated by two processes is that of one process."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from ao_core import QTensor, Report, quantize_
from ao_core.ext import QuantizationError
from ao_core.ext.calibration import OverRanks, over_ranks
from ao_core.testing.programs import one_of_the_ranks
from ao_quant import (
    AutoRoundConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    QronosConfig,
    SmoothQuantConfig,
    UIntxWeightOnlyConfig,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.up, self.down = (
            nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.softmax(self.q(x) @ self.k(x).mT, -1) @ x
        return x + self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Rows go to one of two layers, so that a rank may see none of one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x[0, 0, 0] > 0)
        return x + self.experts[int(positive)](x)


def codes(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.canonical().parts["qdata"]
        for name, p in model.named_parameters()
        if isinstance(p, QTensor)
    }


def learned(dense: nn.Module, data: list[Tensor]) -> None:
    """AutoRound: a step with one batch of each rank is one with all batches of one process."""
    base = UIntxWeightOnlyConfig(2, 32)
    alone, together = copy.deepcopy(dense), copy.deepcopy(dense)
    one = AutoRoundConfig(base, bfloat16=False, iterations=20, batches=len(data), start="nearest")
    expected = quantize_(alone, one, data=data)
    each = AutoRoundConfig(
        base, bfloat16=False, iterations=20, batches=len(data) // 2, start="nearest"
    )
    report = quantize_(together, each, data=over_ranks(data))
    losses = [
        torch.tensor([[r.loss_before, r.loss_after] for r in found.with_status("changed")])
        for found in (expected, report)
    ]
    torch.testing.assert_close(losses[1][:, 0], losses[0][:, 0], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[1][:, 1], losses[0][:, 1], rtol=0.05, atol=0)
    assert (losses[1][:, 1] < losses[1][:, 0]).any()
    same = [(codes(alone)[name] == value).float().mean() for name, value in codes(together).items()]
    assert min(same) > 0.9, same


def main(rank: int) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(Experts(), Block(), Block(), nn.Linear(32, 8)).eval()
    data = [torch.randn(2, 40, 32) for _ in range(4)]
    for number, batch in enumerate(data):  # the first expert is for the second rank alone
        batch[0, 0, 0] = 1.0 if number % 2 == 0 else -1.0
    base = Int4WeightOnlyConfig(32)
    for config in (GPTQConfig(base), QronosConfig(base), SmoothQuantConfig()):
        alone, together = copy.deepcopy(dense), copy.deepcopy(dense)
        expected: Report = quantize_(alone, config, data=data)
        own = over_ranks(data)
        assert len(own) == 2
        report = quantize_(together, config, data=own)
        assert [r.rows for r in report] == [r.rows for r in expected]
        assert [r.status for r in report] == [r.status for r in expected]
        assert report.calibration == expected.calibration
        for name, value in codes(alone).items():
            assert torch.equal(codes(together)[name], value), name
        x = torch.randn(2, 9, 32)
        torch.testing.assert_close(together(x), alone(x), rtol=1e-5, atol=1e-5)
    learned(dense, data)
    bad = [batch.clone() for batch in data]
    bad[1][0, 3, 5] = torch.nan  # of the second rank
    model = copy.deepcopy(dense)
    before = [p.clone() for p in model.parameters()]
    try:
        quantize_(model, GPTQConfig(), data=OverRanks(tuple(bad[rank::2])))
    except QuantizationError as error:
        said = str(error)
    else:
        said = "nothing"
    assert "0.experts.0.weight have NaN or inf in data[0]" in said
    assert said.startswith("rank 1 failed: QuantizationError") == (rank == 0), said
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    sys.stdout.write("calibrated: ok\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])) as own_rank:
        main(own_rank)
