"""Distillation, training block by block, scales alone, a start from another model, and adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import Config, QTensor, quantize_
from ao_core.ext import ConfigError
from ao_core.testing.base import gaussian
from ao_quant import (
    BlockQATConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    LoRAQATConfig,
    NVFP4WeightOnlyConfig,
    QATConfig,
    UIntxWeightOnlyConfig,
)
from ao_quant.qat import qad_loss, start_from_, store_scales_, train_scales_

BASE = UIntxWeightOnlyConfig(3, 32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.relu(self.up(x)))
        return out


class Model(nn.Module):
    """Two blocks, and a layer in none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(x)
        return out


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def data() -> list[Tensor]:
    return [gaussian((16, 64), seed=seed) for seed in range(6)]


def error(made: nn.Module, model: nn.Module) -> float:
    x = gaussian((64, 64), seed=50)
    with torch.no_grad():
        return float((made(x) - model(x)).square().mean())


def train(
    made: nn.Module, model: nn.Module, data: list[Tensor], what: Iterable[Tensor], lr: float
) -> None:
    """Some steps towards the outputs of the original."""
    optimizer = torch.optim.Adam(what, lr=lr)
    for step in range(24):
        x = data[step % len(data)]
        loss = F.mse_loss(made(x), model(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_qad_loss() -> None:
    """KL(teacher ‖ student) of float64, its mask, its temperature, and no gradient of the teacher."""
    student = gaussian((3, 4, 7), seed=1).requires_grad_()
    teacher = gaussian((3, 4, 7), seed=2).requires_grad_()
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) > 0.4
    p, q = ((x.detach().double() / 2).softmax(-1) for x in (teacher, student))
    each = 4 * (p * (p / q).log()).sum(-1)
    for chosen, wanted in ((None, each.mean()), (mask, each[mask].mean())):
        found = qad_loss(student, teacher, chosen, temperature=2.0)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)
    qad_loss(student, teacher).backward()
    assert teacher.grad is None
    expected = (student.detach().softmax(-1) - teacher.detach().softmax(-1)) / 12
    torch.testing.assert_close(student.grad, expected)
    assert float(qad_loss(teacher, teacher).detach()) == pytest.approx(0, abs=1e-7)
    assert float(qad_loss(student, teacher, torch.zeros(3, 4, dtype=torch.bool)).detach()) == 0
    half = qad_loss(student.bfloat16(), teacher.bfloat16())
    assert half.dtype == torch.float32
    for arguments, match in (
        ((student, teacher[:2]), "both must be of the same positions"),
        ((student, teacher, mask[:2]), "logits have positions"),
    ):
        with pytest.raises(ConfigError, match=match):
            qad_loss(*arguments)
    with pytest.raises(ConfigError, match="temperature=0"):
        qad_loss(student, teacher, temperature=0.0)


def test_distillation_from_a_teacher_in_8_bits(model: Model, data: list[Tensor]) -> None:
    student = copy.deepcopy(model)
    teacher = copy.deepcopy(model)
    quantize_(teacher, "int8_weight_only")
    quantize_(student, QATConfig(UIntxWeightOnlyConfig(2, 32)))
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-4)
    losses = []
    for step in range(30):
        x = data[step % len(data)]
        with torch.no_grad():
            wanted = teacher(x)
        loss = qad_loss(student(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-6:]) < 0.7 * sum(losses[:6])


@pytest.mark.parametrize("scales", ["chosen", "learned"])
def test_blocks_then_scales(model: Model, data: list[Tensor], scales: str) -> None:
    """Both phases of EfficientQAT: each lowers the error, and what is stored is what was trained."""
    rounded, made = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(rounded, BASE)
    config = BlockQATConfig(BASE, scales=scales, epochs=4, lr=1e-3, scales_lr=1e-3)
    report = quantize_(made, config, data=data)
    changed = {record.fqn: record for record in report.with_status("changed")}
    assert report.calibration.startswith("blocks")
    for name in ("layers.0.up.weight", "layers.1.down.weight", "last.weight"):
        record = changed[name]
        assert record.loss_before is not None
        assert record.loss_after is not None
        assert record.loss_after <= record.loss_before
        if (
            name != "last.weight"
        ):  # in no block: by its own outputs, which may be the best there are
            assert record.loss_after < record.loss_before
    assert "layers.1 trained together" in changed["layers.1.up.weight"].note
    first = error(made, model)
    assert first < error(rounded, model)
    weight: Any = made.layers[0].up.weight
    codes = weight.canonical().parts["qdata"].clone()
    parameters = train_scales_(made)
    assert len(parameters) == 5
    assert (
        next(n for n, p in made.named_parameters() if p.requires_grad) == "layers.0.up.weight_scale"
    )
    start = error(made, model)
    assert start == pytest.approx(first, rel=1e-4)
    train(made, model, data, parameters, lr=1e-3)
    x = gaussian((5, 64), seed=9)
    trained = made(x)
    assert error(made, model) < first
    store_scales_(made)
    assert torch.equal(made(x), trained)
    assert type(made.layers[0].up) is nn.Linear
    weight = made.layers[0].up.weight
    assert torch.equal(weight.canonical().parts["qdata"], codes)


def test_gradients_of_scales_alone() -> None:
    """The sum over each block of codes less zero points, in float64."""
    layer = nn.Linear(64, 6)
    quantize_(layer, BASE)
    (scale,) = train_scales_(layer)
    q: Any = layer.weight
    x, by = gaussian((9, 64), seed=1), gaussian((9, 6), seed=2)
    (layer(x) * by).sum().backward()
    codes = q.dequantize().double().reshape(6, 2, 32) / scale.detach().double()[..., None]
    grad = (by.double().t() @ x.double()).reshape(6, 2, 32)
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad.double(), (grad * codes).sum(-1), rtol=1e-5, atol=1e-4)
    scale.data[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="its learned scales go from nan to nan"):
        store_scales_(layer)
    assert layer.weight is q


def test_scales_that_cannot_be_trained() -> None:
    layer = nn.Linear(64, 48)
    for match in ("quantize it first", "only one plain scale per block"):
        with pytest.raises(ConfigError, match=match):
            train_scales_(layer)
        quantize_(layer, NVFP4WeightOnlyConfig())
    with pytest.raises(ConfigError, match="call train_scales_ before"):
        store_scales_(layer)


def test_a_loss_that_does_not_fall_changes_nothing(model: Model, data: list[Tensor]) -> None:
    made, rounded = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(made, BlockQATConfig(BASE, scales="chosen", lr=30.0), data=data)
    quantize_(rounded, BASE)
    x = gaussian((5, 64), seed=9)
    assert torch.equal(made(x), rounded(x))


#: without zero points, so that calibration chooses negative scales, too
SIGNED = Int8DynamicActivationInt4WeightConfig(32)


def has_both_signs(scale: Tensor) -> bool:
    return bool((scale < 0).any() and (scale > 0).any())


@pytest.mark.parametrize("base", [BASE, SIGNED], ids=["zero points", "signed scales"])
def test_a_start_from_a_calibrated_model(model: Model, data: list[Tensor], base: Config) -> None:
    """With learned scales the prepared model computes what GPTQ's does, and trains on from there."""
    calibrated = copy.deepcopy(model)
    quantize_(calibrated, GPTQConfig(base), data=data)
    for p in calibrated.parameters():
        p.requires_grad_(False)
    student: Any = copy.deepcopy(model)
    quantize_(student, QATConfig(base, scales="learned"))
    names = start_from_(student, calibrated)
    assert len(names) == 5
    assert has_both_signs(student.layers[0].up.weight_scale) == (base is SIGNED)
    x = gaussian((5, 64), seed=9)
    torch.testing.assert_close(student(x), calibrated(x), rtol=1e-4, atol=1e-4)
    before = error(student, model)
    train(student, model, data, student.parameters(), lr=1e-4)
    assert error(student, model) < before
    trained = student(x)
    quantize_(student, QATConfig(base, "convert", scales="learned"))
    assert torch.equal(student(x), trained)


@pytest.mark.parametrize("base", [BASE, SIGNED], ids=["zero points", "signed scales"])
def test_scales_of_a_calibrated_model_are_trained(
    model: Model, data: list[Tensor], base: Config
) -> None:
    quantize_(model, GPTQConfig(base), data=data)
    x = gaussian((5, 64), seed=9)
    before = model(x)
    scales = train_scales_(model)
    assert has_both_signs(torch.cat([scale.flatten() for scale in scales])) == (base is SIGNED)
    assert torch.equal(model(x), before)
    store_scales_(model)
    assert torch.equal(model(x), before)


def test_a_start_is_refused(model: Model, data: list[Tensor]) -> None:
    calibrated, student = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(calibrated, GPTQConfig(BASE), data=data)
    quantize_(student, QATConfig(BASE, scales="learned"))
    x = gaussian((5, 64), seed=9)
    other = copy.deepcopy(model)
    quantize_(other, UIntxWeightOnlyConfig(3, 64))
    before = student(x)
    with pytest.raises(ConfigError, match="use the same base for both"):
        start_from_(student, other)
    assert torch.equal(student(x), before)
    with pytest.raises(ConfigError, match="none of its weights is prepared"):
        start_from_(model, calibrated)


@pytest.mark.parametrize("mode", ["base", "merged"])
@pytest.mark.parametrize(
    "base",
    [Int4WeightOnlyConfig(32), Int8DynamicActivationInt4WeightConfig(32)],
    ids=["weights", "activations"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters(mode: str, base: Any, dtype: torch.dtype) -> None:
    """What was trained is deployed, bit for bit; gradients are those of W + s B A; W stays."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48).to(dtype)
    start = layer.weight.detach().clone()
    quantize_(layer, LoRAQATConfig(base, mode=mode, rank=4, alpha=8.0))
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    assert trained.keys() == {"bias", "weight_a", "weight_b"}
    x, by = gaussian((9, 64), seed=1).to(dtype), gaussian((9, 48), seed=2).to(dtype)
    a, b = trained["weight_a"], trained["weight_b"]
    b.data.copy_(gaussian((48, 4), seed=3) / 50)
    (layer(x) * by).sum().backward()
    if base == Int4WeightOnlyConfig(32) and dtype == torch.float32:
        grad = by.double().t() @ x.double()
        pairs = ((b, grad @ a.detach().double().t()), (a, b.detach().double().t() @ grad))
        rounding = 1e-2 if mode == "base" else 1e-5  # adapters beside the codes are in bfloat16
        for found, of in pairs:
            assert found.grad is not None
            scale = float(of.abs().max())
            torch.testing.assert_close(
                found.grad.double(), 2 * of, rtol=rounding, atol=2 * rounding * scale
            )
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).float().square().mean().backward()
        optimizer.step()
    weight: Any = layer.weight
    assert torch.equal(weight.memory, start)
    expected = layer(x)
    quantize_(layer, LoRAQATConfig(base, "convert", mode, 4, 8.0))
    assert isinstance(layer.weight, QTensor)
    assert torch.equal(layer(x), expected)
    assert len(layer.weight.spec.input) == (mode == "base")


def test_adapters_that_cannot_be() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "alpha=0"),
        ({"mode": "x"}, "mode='x'"),
    )
    for arguments, match in refused:
        with pytest.raises(ConfigError, match=match):
            LoRAQATConfig(BASE, **arguments)
    with pytest.raises(ConfigError, match="epochs=0"):
        BlockQATConfig(BASE, epochs=0)
    with pytest.raises(ConfigError, match="scales_lr=0"):
        BlockQATConfig(BASE, scales_lr=0.0)
    layer = nn.Linear(64, 48)
    with pytest.warns(UserWarning, match="rank=48 is all of a matrix"):
        quantize_(layer, LoRAQATConfig(BASE, rank=48))
