"""What users give to algorithms by mistake, or without a thought: a sentence, or the right result."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from ao_core import QTensor, Report, quantize_
from ao_core.ext import ConfigError, QuantizationError
from ao_core.ext.calibration import unobservable
from ao_core.ext.quantizing import decide
from ao_core.testing.programs import mesh_of_one
from ao_quant import (
    AWQConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    RotateConfig,
    SmoothQuantConfig,
)

GPTQ = GPTQConfig(Int4WeightOnlyConfig(32))
#: that a configuration comes too late
NOTHING = r"would change nothing: .* quantized already|would find them quantized|by then"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 48), nn.Dropout(0.5), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


def net() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(32, 8))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(64, 32, generator=generator) for _ in range(3)]


def codes(model: nn.Module) -> list[Tensor]:
    found = [p.canonical() for p in model.parameters() if isinstance(p, QTensor)]
    return [tensor.parts["qdata"] for tensor in found]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(codes(a), codes(b), strict=True))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "it needs calibration data; pass a list of inputs"),
        ([], "data is empty"),
        (torch.randn(4, 32), "a single Tensor"),
        ({"x": torch.randn(4, 32)}, "a single dict"),
        (["text"], r"data\[0\]='text' \(str\): an input of the model is a tensor"),
        ([torch.randn(4, 31)], "the model, a Sequential, cannot be called with it"),
        ([torch.randn(4, 32), torch.full((4, 32), torch.inf)], r"0\.up\.weight .*in data\[1\]"),
    ],
)
def test_data_that_are_none(data: object, says: str) -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((ConfigError, QuantizationError), match=says):
        quantize_(model, GPTQ, data=data)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.training


def test_a_model_in_training_mode_and_frozen_weights() -> None:
    training = net()
    training[0].requires_grad_(False)
    evaluating = copy.deepcopy(training).eval()
    quantize_(training, GPTQ, data=batches())
    quantize_(evaluating, GPTQ, data=batches())
    assert training.training
    assert training[0].drop.training
    assert same(training, evaluating)
    assert not any(p.requires_grad for p in training.parameters() if isinstance(p, QTensor))
    assert training[1].up.bias.requires_grad
    assert not training[0].up.bias.requires_grad


def test_a_weight_in_two_blocks_sees_the_inputs_of_both() -> None:
    model = net()
    model[1].up.weight = model[0].up.weight
    report: Report = quantize_(model, GPTQ, data=batches())
    assert model[1].up.weight is model[0].up.weight
    assert isinstance(model[0].up.weight, QTensor)
    record = next(r for r in report if r.fqn == "0.up.weight")
    assert (record.rows, record.tied) == (2 * 3 * 64, ("1.up.weight",))
    assert "used in more than one place" in report.calibration


@pytest.mark.parametrize("first", [AWQConfig(), SmoothQuantConfig()])
def test_a_rotation_after_factors_of_channels(first: object) -> None:
    model = net()
    parameters = list(model.parameters())
    with pytest.raises(
        ConfigError, match="RotateConfig after .*mixtures of those that factors were found for"
    ):
        quantize_(model, [first, RotateConfig(), GPTQ], data=batches())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_a_sharded_weight_says_to_quantize_before(tmp_path: Path) -> None:
    with mesh_of_one(tmp_path) as mesh:
        model = net()
        weight = distribute_tensor(model[0].up.weight.detach(), mesh, [Shard(0)])
        model[0].up.weight = nn.Parameter(weight)
        (entry,) = (e for e in decide(model, GPTQ, None) if e.fqn == "0.up.weight")
        reason = unobservable(entry)
    assert reason == "the inputs of sharded weights are not observed; do it before sharding"


def test_few_rows_have_a_note_and_unseen_weights_a_reason() -> None:
    model = net()
    report = quantize_(model, GPTQ, data=[torch.randn(20, 32)])
    notes = {r.fqn: r.note for r in report if r.status == "changed"}
    assert "saw 20 rows for 48 columns" in notes["0.down.weight"]
    model = net()
    model[1].spare = nn.Linear(32, 8)
    reasons = {r.fqn: r.reason for r in quantize_(model, GPTQ, data=batches())}
    assert reasons["1.spare.weight"] == "the calibration data never reached it"


@pytest.mark.parametrize("second", [AWQConfig(), SmoothQuantConfig(), Int8WeightOnlyConfig()])
def test_what_comes_after_quantizing_and_would_do_nothing(second: object) -> None:
    model = net()
    parameters = list(model.parameters())
    with pytest.raises(
        ConfigError,
        match=NOTHING,
    ):
        quantize_(model, [GPTQ, second], data=batches())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    once = quantize_(model, GPTQ, data=batches())
    again = quantize_(model, GPTQ, data=batches())  # the same call on a model that is done
    assert len(once.with_status("changed")) == 5
    assert {r.status for r in again} == {"unchanged"}
