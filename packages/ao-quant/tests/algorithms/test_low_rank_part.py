"""Parts of low rank that are taken out before weights are quantized, against the spectrum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ao_core import QTensor, Report, load_model, quantize_, save_model
from ao_core.ext import ConfigError
from ao_core.ext.quantizing import stack_of
from ao_quant import (
    AutoRoundConfig,
    AWQConfig,
    BitNetWeightOnlyConfig,
    EqualizeConfig,
    GGUFWeightOnlyConfig,
    GPTQConfig,
    Int4DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    IntxWeightOnlyConfig,
    LowRankConfig,
    NVFP4WeightOnlyConfig,
    RotateConfig,
    SmoothQuantConfig,
)
from ao_quant.algorithms import low_rank_part
from ao_quant.algorithms.low_rank_part import nearest_of_rank

W4A4 = Int4DynamicActivationInt4WeightConfig()
RANK = 8


class Block(nn.Module):
    """With a few channels whose activations are large, and weights that are partly of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)
        with torch.no_grad():
            self.norm.weight[:3] *= 20
            for layer in (self.up, self.down):
                rows, columns = layer.weight.shape
                layer.weight += 0.1 * torch.randn(rows, 2) @ torch.randn(2, columns)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net() -> nn.Sequential:
    return nn.Sequential(Block(), Block()).eval()


def batches() -> list[Tensor]:
    return [torch.randn(96, 64) for _ in range(3)]


def error(model: nn.Module, dense: nn.Module) -> float:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean())


@pytest.mark.parametrize("large", [False, True])
def test_what_is_left_is_the_tail_of_the_spectrum(large: bool, monkeypatch: object) -> None:
    """Also where the first directions are found by iteration, as in large matrices."""
    matrix = torch.randn(80, 120) + torch.randn(80, 5) @ torch.randn(5, 120)
    if large:
        monkeypatch.setattr(low_rank_part, "_LARGE", 10)  # type: ignore[attr-defined]
    b, a = nearest_of_rank(matrix, RANK)
    assert (b.shape, a.shape) == ((80, RANK), (RANK, 120))
    left = (matrix.double() - b.double() @ a.double()).square().sum()
    tail = torch.linalg.svdvals(matrix.double())[RANK:].square().sum()
    assert 1 - 1e-6 < float(left / tail) < (1.01 if large else 1 + 1e-6)


BASES = [
    Int4WeightOnlyConfig(32),
    W4A4,
    NVFP4WeightOnlyConfig(),
    GPTQConfig(IntxWeightOnlyConfig(3, 32)),
    AutoRoundConfig(IntxWeightOnlyConfig(3, 32), iterations=4),
]


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_the_rest_is_quantized_by_any_format_and_algorithm(base: object, tmp_path) -> None:
    dense, data = net(), batches()
    model, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    report = quantize_(model, [LowRankConfig(rank=RANK), base], data=data)
    needs = isinstance(base, (GPTQConfig, AutoRoundConfig))
    quantize_(plain, base, **({"data": data} if needs else {}))
    assert error(model, dense) < 0.6 * error(plain, dense)
    records = [record for record in report if record.spec]
    assert len(records) == 4
    for record in records:
        assert f"low_rank({RANK})" in record.spec
        assert f"rank {RANK} taken out" in record.note
    q, w = model[0].up.weight, dense[0].up.weight.detach()
    assert isinstance(q, QTensor)
    rest = q.dequantize(torch.float32) - q.low_rank_b.float() @ q.low_rank_a.float()
    tail = torch.linalg.svdvals(w.double())[RANK:].square().sum()
    # codes are nearest to what is left, which is smaller than the weight
    assert 0.8 < float(rest.square().sum() / tail) < 1.3
    save_model(model, tmp_path / "model.safetensors")
    fresh = copy.deepcopy(dense)
    load_model(fresh, tmp_path / "model.safetensors")
    assert error(fresh, dense) == error(model, dense)


def test_smoothing_comes_first() -> None:
    """SVDQuant: outliers of activations move into weights, and from there into the part."""
    dense, data = net(), batches()
    errors = {}
    for name in ("smoothquant/w4a4", "low_rank/w4a4", "smoothquant+low_rank/w4a4"):
        model = copy.deepcopy(dense)
        report = quantize_(model, name, data=data)
        errors[name] = error(model, dense)
    both = errors["smoothquant+low_rank/w4a4"]
    assert both < 0.7 * min(value for name, value in errors.items() if value != both)
    note = next(record.note for record in report if record.fqn == "0.up.weight")
    assert note.index("SmoothQuant: alpha = ") < note.index("rank 32 taken out")
    assert stack_of("smoothquant+low_rank/w4a4") == [SmoothQuantConfig(), LowRankConfig(W4A4)]


def test_a_scale_that_stays_an_input_step_is_before_it() -> None:
    model, dense = (m := nn.Sequential(nn.Linear(64, 64)).eval()), copy.deepcopy(m)
    data = [torch.randn(200, 64) * torch.linspace(0.1, 8, 64)]
    report = quantize_(model, [SmoothQuantConfig(), LowRankConfig(rank=RANK), W4A4], data=data)
    assert f"input=(scale, low_rank({RANK}))" in report.records[0].spec
    with torch.no_grad():
        assert float((model(data[0]) - dense(data[0])).norm() / dense(data[0]).norm()) < 0.15


def test_what_gains_nothing_or_cannot_have_it_stays_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16)).eval()
    hadamard = torch.tensor([[1.0]])
    for _ in range(6):
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    with torch.no_grad():
        model[0].weight.copy_(hadamard)  # which three values hold as it is
    report: Report = quantize_(
        model, [LowRankConfig(rank=16), BitNetWeightOnlyConfig()], data=batches()
    )
    notes = {record.fqn: record.note for record in report}
    assert "no part of low rank: with rank 16 its outputs have" in notes["0.weight"]
    assert "rank 16 is all of a matrix of (16, 64)" in notes["1.weight"]
    assert not any("low_rank" in record.spec for record in report)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([LowRankConfig()], "base=None: LowRankConfig leaves the rest"),
        (
            [LowRankConfig(), SmoothQuantConfig(), W4A4],
            "put SmoothQuantConfig before LowRankConfig",
        ),
        ([LowRankConfig(), AWQConfig(), W4A4], "put AWQConfig before LowRankConfig"),
        ([LowRankConfig(), RotateConfig(), W4A4], "put RotateConfig before LowRankConfig"),
        ([LowRankConfig(), EqualizeConfig(), W4A4], "put EqualizeConfig before LowRankConfig"),
        ([LowRankConfig(), LowRankConfig(), W4A4], "put LowRankConfig before LowRankConfig"),
        ([LowRankConfig(), GGUFWeightOnlyConfig("q8_0")], "there are no weights of linear layers"),
    ],
    ids=str,
)
def test_what_makes_no_sense(config: list[object], text: str) -> None:
    model = net()
    before = list(model.parameters())
    with pytest.raises(ConfigError, match=text):
        quantize_(model, config, data=batches())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="rank=0: must be positive"):
        LowRankConfig(rank=0)
