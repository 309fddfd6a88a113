"""Algorithms behind `quantize_(model, config, data=batches)`: order, refusals, lists, and the report."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import ao_core
from ao_core import FqnToConfig, QTensor, quantize_
from ao_core.calibration.statistics import HESSIAN, SQUARES, Statistics
from ao_core.config import Config
from ao_core.errors import ConfigError, PluginError, QuantizationError, UnknownNameError
from ao_core.recipes import WeightOnlyConfig
from ao_core.records import Algorithm, Skip, Solved
from ao_core.registry import registry
from ao_core.report import Report

INT8 = WeightOnlyConfig("int8")


@dataclass(frozen=True)
class Halves(Config):
    """Test algorithm: dense weights times a factor that follows from the inputs, then a format."""

    inner: Config | None = None
    factor: float = 0.5
    needs_data: bool = True


@dataclass(frozen=True)
class Fitted(Config):
    """Test algorithm that sees the model as it is: a configuration for each weight."""

    broken: bool = field(default=False, kw_only=True)


SEEN: dict[str, list[object]] = {"after": [], "rows": []}


def _halve(
    weight: Tensor, statistics: tuple[Statistics, ...], config: Halves, target: object
) -> Solved | Skip:
    if weight.shape[1] == 3:
        return Skip("three rows are too few")
    factors = [each["hessian"].diagonal().sum() for each in statistics]
    SEEN["rows"].append([each.rows for each in statistics])
    scale = torch.stack(factors).to(weight.dtype).view(-1, 1, 1)
    values = weight * config.factor * (scale / scale)
    return Solved(values, config.inner, damping=0.01)


def _fit(
    weight: Tensor, statistics: tuple[Statistics, ...], config: Fitted, target: object
) -> Solved:
    if config.broken:
        raise QuantizationError("broken")
    return Solved(config=INT8)


@pytest.fixture(autouse=True, scope="module")
def algorithms() -> Iterator[None]:
    tables = (registry.algorithms, registry.transforms)
    before = [dict(table._records) for table in tables]
    claims = dict(registry._algorithm_of)
    ao_core.register(
        Algorithm(
            "halves",
            Halves,
            lambda config: (HESSIAN,) if config.needs_data else (),
            _halve,
            refuses=lambda weight, config, target: "named so" if "odd" in target.fqn else None,
        )
    )
    ao_core.register(
        Algorithm(
            "fitted",
            Fitted,
            lambda config: (SQUARES,),
            _fit,
            sequential=False,
            after=lambda found: SEEN["after"].append(sorted(found)),
        )
    )
    yield
    for table, records in zip(tables, before, strict=True):
        table._records.clear()
        table._records.update(records)
    registry._algorithm_of.clear()
    registry._algorithm_of.update(claims)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.Linear(6, 3)).eval()


def batches() -> list[Tensor]:
    return [torch.randn(n, 6) for n in (5, 11)]


def test_weights_are_rewritten_in_turn_and_reported() -> None:
    model, data = net(), batches()
    dense = copy.deepcopy(model).requires_grad_(False)
    report = quantize_(model, Halves(INT8), data=data)
    first = model[0].weight
    assert isinstance(first, QTensor)
    torch.testing.assert_close(
        first.dequantize(),
        dense[0].weight * 0.5,
        rtol=0,
        atol=float(dense[0].weight.abs().max() / 250),
    )
    assert [r.status for r in report] == ["changed", "unchanged"] * 2 + ["skipped", "unchanged"]
    record = report.records[0]
    assert (record.rows, record.damping) == (16, 0.01)
    assert record.sqnr_db is not None
    assert 5.9 < record.sqnr_db < 6.1  # half of the weight is gone, against the weight as it was
    x = torch.cat(data).double()
    hessian = x.T @ x
    nearest = net()
    nearest.load_state_dict(dense.state_dict())
    quantize_(nearest, INT8)

    def error(new: Tensor) -> float:
        delta = new.dequantize().double() - dense[0].weight.double()  # type: ignore[attr-defined]
        return float(((delta @ hessian) * delta).sum())

    expected = error(first) / error(nearest[0].weight)
    assert record.error_vs_rtn == pytest.approx(expected, rel=1e-4)
    assert expected > 100
    assert report.records[4].reason == "three rows are too few"
    assert report.calibration == ("blocks (the Sequential: 4 blocks, called once each in order)")
    text = str(report)
    assert "damping" in text
    assert "error/RTN" in text
    assert f"calibrated by {report.calibration}" in text
    again = Report.from_json(report.to_json())
    assert again == report
    assert json.loads(report.to_json())["records"][0]["rows"] == 16
    page = report.to_html()
    assert all(head in page for head in ("Rows", "Damping", "Error/RTN"))
    plain = quantize_(net(), INT8)
    assert "rows" not in str(plain)
    assert "rows" not in json.loads(plain.to_json())["records"][0]
    assert "Damping" not in plain.to_html()


def test_inputs_come_from_new_weights_and_from_those_that_need_no_data() -> None:
    model, data = net(), batches()
    seen: list[Tensor] = []

    def solve(
        weight: Tensor, statistics: tuple[Statistics, ...], config: object, target: object
    ) -> Solved:
        seen.append(statistics[0]["hessian"])
        return Solved(weight * 2)

    algorithm = registry.algorithms.get("halves")
    object.__setattr__(algorithm, "solve", solve)
    try:
        report = quantize_(model, FqnToConfig({"0": INT8, "2": Halves(), "3": Halves()}), data=data)
    finally:
        object.__setattr__(algorithm, "solve", _halve)
    with torch.no_grad():
        hidden = [torch.relu(model[0](x)) for x in data]
        inputs = hidden, [model[2](rows) for rows in hidden]
    hessians = [sum((x.t() @ x).double() for x in rows) for rows in inputs]
    assert torch.equal(seen[0], hessians[0])
    assert torch.equal(seen[1], hessians[1])
    assert type(model[2].weight) is nn.Parameter
    assert [r.status for r in report.with_status("changed")] == ["changed"] * 3
    assert report.records[2].error_vs_rtn is None
    assert ao_core.resolve_config(report.config).entries[1] == ("2", Halves())


def test_the_model_as_it_is_gives_configurations() -> None:
    model, data = net(), batches()
    SEEN["after"].clear()
    report = quantize_(model, Fitted(), data=data)
    assert SEEN["after"] == [["0.weight", "2.weight", "3.weight"]]
    expected = net()
    expected.load_state_dict(
        {k: v for k, v in model.state_dict().items() if "bias" in k}, strict=False
    )
    assert all(isinstance(model[n].weight, QTensor) for n in (0, 2, 3))
    again = net()
    quantize_(
        again, ao_core.resolve_config(report.config)
    )  # the configuration that was found needs none
    assert isinstance(again[0].weight, QTensor)
    assert report.records[0].rows == 16
    assert not report.calibration


def test_a_list_is_applied_in_order_and_all_or_nothing() -> None:
    model, data = net(), batches()
    dense = copy.deepcopy(model).requires_grad_(False)
    report = quantize_(model, [FqnToConfig({"0": Halves(), "2": Halves()}), INT8], data=data)
    assert [r.status for r in report.records[::2]] == ["changed"] * 3
    assert isinstance(model[0].weight, QTensor)
    half = dense[0].weight * 0.5
    torch.testing.assert_close(
        model[0].weight.dequantize(), half, rtol=0, atol=float(half.abs().max() / 250)
    )
    assert report.bytes_before == sum(p.numel() * 4 for p in dense.parameters())
    assert report.bytes_after < report.bytes_before
    assert len(report.config["sequence"]) == 2
    assert Report.from_json(report.to_json()) == report

    fresh = net()
    parameters = list(fresh.parameters())
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(QuantizationError, match="broken"):
        quantize_(fresh, [Halves(), FqnToConfig({"0": INT8}), Fitted(broken=True)], data=data)
    assert all(a is b for a, b in zip(fresh.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), before, strict=True))


def test_data_that_nobody_needs_and_data_that_is_missing() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"data=.*WeightOnlyConfig needs no calibration data"):
        quantize_(model, INT8, data=batches())
    with pytest.raises(ConfigError, match=r"needs no calibration data"):
        quantize_(model, Halves(needs_data=False), data=batches())
    for config in (Halves(), [INT8, Halves()], FqnToConfig({"0": Halves(), "*": INT8})):
        with pytest.raises(ConfigError, match=r"Halves.*needs calibration data.*data=batches"):
            quantize_(model, config)
    with pytest.raises(ConfigError, match="a single Tensor"):
        quantize_(model, Halves(), data=batches()[0])
    with pytest.raises(ConfigError, match=r"config=\[\]"):
        quantize_(model, [])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with pytest.raises(UnknownNameError, match=r"'Halves'.*needs calibration data"):
        registry.transform_for(Halves)


def test_what_cannot_be_solved_is_skipped_with_a_sentence() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.never, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.done = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.done(self.last(self.odd(x)))

    model = Model()
    quantize_(model, FqnToConfig({"done": INT8}))
    report = quantize_(model, Halves(INT8), data=batches())
    by_name = {r.fqn: (r.status, r.reason) for r in report if r.fqn.endswith("weight")}
    assert by_name["odd.weight"] == ("skipped", "named so")
    assert by_name["never.weight"] == ("skipped", "the calibration data never reached it")
    assert by_name["last.weight"][0] == "changed"
    assert by_name["done.weight"][0] == "unchanged"
    with pytest.raises(QuantizationError, match="strict=True and 2 weights"):
        quantize_(copy.deepcopy(Model()), Halves(INT8), data=batches(), strict=True)


def test_two_algorithms_of_one_configuration() -> None:
    with pytest.raises(PluginError, match="Halves"):
        ao_core.register(Algorithm("other", Halves, lambda config: (), _halve))
