"""`quantize_`: which parameters, ties, reports, moves, and errors that leave the model as it was."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ao_core
from ao_core import (
    WHOLE,
    ComputeWeight,
    Config,
    FqnToConfig,
    QTensor,
    Skip,
    Spec,
    Target,
    Transform,
    quantize_tensor,
)
from ao_core.errors import ConfigError, QuantizationError, UnknownNameError, UnsupportedOp
from ao_core.outcome import NothingConvertedWarning, StaleParameterWarning
from ao_core.recipes import WeightOnlyConfig
from ao_core.registry import registry


@dataclass(frozen=True)
class EightBits(Config):
    """Per row, and nothing with more than three dimensions."""

    dtype: str = "int8"
    least_rows: int = 0


def _apply(weight: Tensor, config: EightBits, target: Target) -> Tensor | Skip:
    if weight.dim() > 3:
        return Skip("more than three dimensions")
    if len(weight) < config.least_rows:
        return Skip(f"fewer than {config.least_rows} rows", kept=True)
    return quantize_tensor(weight, Spec(config.dtype, (1, WHOLE)))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    ao_core.register(Transform(EightBits, "eight_bits", 1, _apply))
    yield
    registry.transforms._records.pop("eight_bits")
    registry.transforms._providers.pop("eight_bits")
    registry._transform_of.pop(EightBits)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.image = nn.Conv2d(4, 4, 3)
        self.experts = nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.position = nn.Parameter(torch.randn(1, 5, 16))
        self.table = nn.Parameter(torch.randn(6, 7))
        self.head = nn.Linear(16, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        x = self.norm(self.attention(x, x, x, need_weights=False)[0])
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = torch.einsum("bsk,enk->bsn", x, self.experts)
        return self.head(x)


@pytest.fixture
def model() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model().eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(10).reshape(2, 5)


def _same(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(
        type(x[k]) is type(y[k]) and torch.equal(x[k], y[k]) for k in x
    )


def test_quantizes_weights_and_explains_the_rest(model: Model, ids: Tensor) -> None:
    dense = model(ids)
    report = ao_core.quantize_(model, EightBits())
    status = {record.fqn: record.status for record in report}
    assert status == {
        "embed.weight": "unchanged",
        "attention.in_proj_weight": "changed",
        "attention.in_proj_bias": "unchanged",
        "attention.out_proj.weight": "changed",
        "attention.out_proj.bias": "unchanged",
        "norm.weight": "unchanged",
        "norm.bias": "unchanged",
        "conv.weight": "changed",
        "conv.bias": "unchanged",
        "image.weight": "skipped",
        "image.bias": "unchanged",
        "experts": "changed",
        "position": "unchanged",
        "table": "unchanged",
        "head.weight": "changed",
    }
    assert all(record.reason for record in report if record.status != "changed")
    out = model(ids)
    assert 25 < ao_core.numerics.sqnr(dense, out) < 60
    for record in report.with_status("changed"):
        assert record.sqnr_db is not None
        assert 40 < record.sqnr_db < 55, record
        assert record.bytes_after < 0.6 * record.bytes_before
    assert report.bytes_after == sum(
        p.stored_bytes if isinstance(p, QTensor) else p.numel() * 4 for p in model.parameters()
    )


def test_twice_is_harmless_and_reported(model: Model, ids: Tensor) -> None:
    ao_core.quantize_(model, EightBits())
    before, out = copy.deepcopy(model), model(ids)
    report = ao_core.quantize_(model, EightBits())
    assert report.with_status("changed") == []
    assert sum("quantized already" in record.reason for record in report) == 5
    assert _same(model, before)
    assert torch.equal(model(ids), out)


def test_names_win_over_expressions_over_the_star(model: Model) -> None:
    config = FqnToConfig(
        {
            "head": None,
            "re:.*(head|embed).*": EightBits("f8e4m3"),
            "table": EightBits(),
            "*": EightBits(),
        }
    )
    report = ao_core.quantize_(model, config)
    spec = {r.fqn: r.spec for r in report.with_status("changed")}
    assert "head.weight" not in spec
    assert spec["embed.weight"].startswith("f8e4m3")
    assert spec["table"].startswith("int8")
    assert spec["experts"].startswith("int8")
    assert "norm.weight" not in spec


def test_filter_fn_replaces_the_default(model: Model) -> None:
    report = ao_core.quantize_(model, EightBits(), lambda module, name: name == "embed")
    assert [record.fqn for record in report.with_status("changed")] == ["embed.weight"]


def test_ties_stay(model: Model) -> None:
    model.head.weight = model.embed.weight
    report = ao_core.quantize_(model, EightBits())
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, QTensor)
    (record,) = [r for r in report if r.fqn == "embed.weight"]
    assert record.tied == ("head.weight",)
    names = ao_core.dequantize_(model)
    assert {"head.weight", "embed.weight"} <= set(names)
    assert model.head.weight is model.embed.weight
    assert not isinstance(model.embed.weight, QTensor)


def test_dequantize_gives_the_same_outputs(model: Model, ids: Tensor) -> None:
    ao_core.quantize_(model, EightBits())
    quantized = model(ids)
    names = ao_core.dequantize_(model)
    assert len(names) == 5
    assert not any(isinstance(p, QTensor) for p in model.parameters())
    torch.testing.assert_close(model(ids), quantized, rtol=1e-4, atol=1e-5)


def test_strict_changes_nothing_and_names_what_failed(model: Model) -> None:
    before = copy.deepcopy(model)
    with pytest.raises(QuantizationError, match=r"image\.weight: more than three dimensions"):
        ao_core.quantize_(model, EightBits(), strict=True)
    assert _same(model, before)
    config = FqnToConfig({"image": None, "*": EightBits()})
    report = ao_core.quantize_(model, config, strict=True)
    assert report.with_status("skipped") == []
    assert isinstance(model.head.weight, QTensor)


def test_progress_is_called_for_each_parameter(model: Model) -> None:
    calls: list[tuple[int, int, str]] = []
    report = ao_core.quantize_(model, EightBits(), progress=lambda *call: calls.append(call))
    count = len(report.records)
    assert [done for done, _, _ in calls] == list(range(count + 1))
    assert {total for _, total, _ in calls} == {count}
    assert calls[0][2] == report.records[0].fqn


def test_a_bar(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    ao_core.quantize_(model, EightBits(), progress=True)
    assert "quantize" in capsys.readouterr().err


def test_quiet_without_progress(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    ao_core.quantize_(model, EightBits())
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_moves_to_the_device(model: Model, ids: Tensor) -> None:
    ao_core.quantize_(model, EightBits(), device="cpu")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model(ids).shape == (2, 5, 11)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(model: Model, value: float) -> None:
    with torch.no_grad():
        model.head.weight[3, 4] = value
    before = copy.deepcopy(model)
    with pytest.raises(QuantizationError, match=r"head\.weight has 1 NaN or inf values of 176"):
        ao_core.quantize_(model, EightBits())
    assert isinstance(model.attention.in_proj_weight, nn.Parameter)
    assert not isinstance(model.attention.in_proj_weight, QTensor)
    assert [k for k, v in before.state_dict().items() if not v.equal(model.state_dict()[k])] in (
        [],
        ["head.weight"],  # NaN differs from itself
    )


def test_integer_and_meta_weights(model: Model) -> None:
    model.head.weight = nn.Parameter(torch.ones(11, 16, dtype=torch.int64), requires_grad=False)
    with pytest.raises(QuantizationError, match=r"head\.weight has dtype torch\.int64"):
        ao_core.quantize_(model, EightBits())
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(QuantizationError, match="experts is on the meta device"):
        ao_core.quantize_(empty, EightBits())


def test_names_that_match_nothing(model: Model) -> None:
    before = copy.deepcopy(model)
    for key, kind in (("re:.*mpl.*", "regular expression"), ("heads", "name")):
        with pytest.raises(
            ConfigError, match=f"the {kind} {key!r}".replace("*", r"\*").replace(".", r"\.")
        ):
            ao_core.quantize_(model, FqnToConfig({key: EightBits(), "*": EightBits()}))
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        ao_core.quantize_(model, FqnToConfig({"re:(": EightBits()}))
    with pytest.raises(UnknownNameError, match="Did you mean 'eight_bits'"):
        ao_core.quantize_(model, "eight_bit")
    assert _same(model, before)


def test_empty_and_plain_models() -> None:
    assert ao_core.quantize_(nn.Sequential(), EightBits()).coverage == 0
    single = nn.Linear(4, 3)
    report = ao_core.quantize_(single, EightBits())
    assert [record.fqn for record in report.with_status("changed")] == ["weight"]
    assert single(torch.zeros(0, 4)).shape == (0, 3)


def test_large_weights_sample_their_sqnr() -> None:
    layer = nn.Linear(3000, 3000, bias=False)
    report = ao_core.quantize_(layer, EightBits())
    (record,) = report.records
    assert record.sqnr_db is not None
    assert 35 < record.sqnr_db < 50


@pytest.mark.usefixtures("rowwise_training")
def test_compute_weights_stay_trainable() -> None:
    layer = nn.Linear(8, 4)
    report = ao_core.quantize_(layer, "rowwise_training")
    assert layer.weight.requires_grad
    assert report.records[0].bytes_after == report.records[0].bytes_before
    conv = nn.Conv1d(2, 2, 3)
    with pytest.warns(NothingConvertedWarning, match="weight: low-precision matmuls are defined"):
        (skipped,) = ao_core.quantize_(conv, "rowwise_training").with_status("skipped")
    assert "2-D" in skipped.reason


def test_compute_weights_are_quantized_from_their_memory(rowwise_training: Any) -> None:
    layer = nn.Linear(8, 4)
    dense = layer.weight.detach().clone()
    ao_core.quantize_(layer, "rowwise_training")
    (again, _) = ao_core.quantize_(layer, "rowwise_training")
    assert (again.status, again.reason) == (
        "unchanged",
        "its matmuls are in low precision already",
    )
    with pytest.warns(
        NothingConvertedWarning, match="an earlier conversion already .all three matmuls f8e4m3"
    ):
        (other, _) = ao_core.quantize_(layer, rowwise_training("int8"))
    assert other.status == "skipped"
    (record, _) = ao_core.quantize_(layer, WeightOnlyConfig("int8"))
    assert record.status == "changed"
    expected = quantize_tensor(dense, layer.weight.spec)
    assert torch.equal(layer.weight.dequantize(), expected.dequantize())
    assert not layer.weight.requires_grad


def test_what_the_configuration_keeps_is_no_failure() -> None:
    with pytest.warns(NothingConvertedWarning, match="weight: fewer than 5 rows"):
        (record, _) = ao_core.quantize_(nn.Linear(8, 4), EightBits(least_rows=5), strict=True)
    assert (record.status, record.reason) == ("unchanged", "fewer than 5 rows")
    assert (
        ao_core.quantize_(nn.Linear(8, 5), EightBits(least_rows=5)).records[0].status == "changed"
    )


def test_a_format_that_cannot_be_cut_is_sampled_whole() -> None:
    layer = nn.Linear(2500, 2500, bias=False)
    flat = quantize_tensor(layer.weight.detach(), Spec("int8", (256,), layout="flat"))
    with pytest.raises(UnsupportedOp, match="index_select on layout 'flat'"):
        flat.index_select(0, torch.tensor([0]))
    transform = Transform(type("Flat", (EightBits,), {}), "flat_bits", 1, lambda w, c, t: flat)
    ao_core.register(replace(transform))
    (record,) = ao_core.quantize_(layer, "flat_bits").records
    assert record.sqnr_db is not None
    assert 40 < record.sqnr_db < 50
    registry.transforms._records.pop("flat_bits")
    registry.transforms._providers.pop("flat_bits")
    registry._transform_of.pop(transform.config_type)


def test_memory_of_replaced_weights_is_free() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    dense = [weakref.ref(layer.weight) for layer in layers]
    report = ao_core.quantize_(layers, EightBits())
    assert len(report.with_status("changed")) == 3
    assert not any(watch() for watch in dense)


@pytest.mark.usefixtures("rowwise_training")
def test_parameters_that_train_stay_the_objects_they_are() -> None:
    """So an optimizer that was made before goes on with them, their state and their hooks."""
    layer = nn.Linear(8, 4, bias=False)
    weight = layer.weight
    weight.tag = "mine"  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state, before = optimizer.state[weight], weight.detach().clone()
    ao_core.quantize_(layer, "rowwise_training")
    assert layer.weight is weight
    assert isinstance(weight, ComputeWeight)
    assert isinstance(weight, nn.Parameter)
    assert weight.tag == "mine"  # type: ignore[attr-defined]
    assert weight.grad is not None
    assert optimizer.state[weight] is state
    optimizer.step()
    assert not torch.equal(weight.detach(), before)


@pytest.mark.usefixtures("rowwise_training")
def test_parameters_that_cannot_stay_are_named() -> None:
    layer = nn.Linear(8, 4, bias=False)
    old, held = layer.weight, weakref.ref(layer.weight)
    with pytest.warns(StaleParameterWarning, match="weight had to be replaced"):
        ao_core.quantize_(layer, "rowwise_training")
    assert held() is old
    assert layer.weight is not old


def test_a_reference_to_a_dense_weight_stays_dense() -> None:
    """What is quantized for inference is a new parameter: the old one may still be wanted."""
    layer = nn.Linear(8, 4, bias=False)
    old = layer.weight
    ao_core.quantize_(layer, EightBits())
    assert type(old) is nn.Parameter
    assert isinstance(layer.weight, QTensor)
