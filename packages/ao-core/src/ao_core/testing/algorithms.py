"""`AlgorithmSuite`: what an algorithm that needs calibration data must do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core.calibration.inputs import UNSEEN
from ao_core.calibration.statistics import Statistics, merged
from ao_core.config import Config, config_from_json, config_to_json
from ao_core.errors import ConfigError, QuantizationError
from ao_core.neutral import restored
from ao_core.numerics import sqnr
from ao_core.quantize import quantize_
from ao_core.records import Algorithm, Skip, Solved
from ao_core.registry import registry
from ao_core.report import Report
from ao_core.tensor import QTensor
from ao_core.testing.algorithm_cases import (
    AlgorithmCase,
    calibration_rows,
    nearly_equal,
    same_answers,
    statistics_of,
)
from ao_core.testing.base import Suite, as_bytes, available_devices, gaussian, same_bits
from ao_core.testing.registered import registered
from ao_core.testing.transforms import SUBJECTS, Subject

__all__ = ["AlgorithmSuite"]

#: (matrices, rows, columns), dtype: a plain one, which must be solved; ragged; one row; experts; filters
CASES: tuple[tuple[tuple[int, int, int], torch.dtype], ...] = (
    ((1, 48, 64), torch.float32),
    ((1, 33, 70), torch.bfloat16),
    ((1, 1, 64), torch.float32),
    ((3, 16, 32), torch.float16),
    ((2, 5, 27), torch.float32),
)


def _everything(module: nn.Module, name: str) -> bool:
    return True


class AlgorithmSuite(Suite):
    """Tests of an algorithm with one of its configurations, on matrices and on small models.

    Attributes:
        config: an instance of the configuration, which needs data.
        error_range: what the squared error of the outputs on the calibration data may be, over that of
            rounding to nearest (of `nearest`, where values stay dense). An error below it would mean that
            nothing is quantized.
        sqnr_range: what the SQNR of a model's output on the calibration data may be, in dB.
        cases: shapes (matrices, rows, columns) of weights, and their dtypes; the first must be solved.
        subjects: kinds of layers to calibrate, besides a model of two linear layers.
    """

    config: Config
    error_range: tuple[float, float] = (0.005, 1.0)
    sqnr_range: tuple[float, float] = (2.0, 75.0)
    cases: Sequence[tuple[tuple[int, int, int], torch.dtype]] = CASES
    subjects: Sequence[Subject] = tuple(each for each in SUBJECTS if not each.ids)

    @property
    def record(self) -> Algorithm:
        """The record under test."""
        found = registry.algorithm_for(type(self.config))
        assert found is not None, f"no algorithm is registered for {type(self.config).__name__}"
        return found

    argument_names = ("case", "subject")

    def arguments(self) -> dict[str, Sequence[Any]]:
        """`case`: all on each device; `subject`: all."""
        devices = available_devices()
        cases = [AlgorithmCase(*case, device) for case in self.cases for device in devices]
        return {"case": cases, "subject": self.subjects}

    def nearest(self, weight: Tensor) -> Tensor:
        """For values that stay dense: what (E, N, K) they are compared with, such as pruning by magnitude."""
        raise AssertionError(
            f"algorithm {self.record.name!r}: Solved.config is None, so there is no rounding to nearest; "
            "override `nearest`"
        )

    def solved(self, case: AlgorithmCase, inputs: Sequence[Tensor]) -> Solved | None:
        """The answer for statistics of these inputs; None where the algorithm says why there is none."""
        return self._solved(case, case.weight(), statistics_of(self._needs, inputs))

    def _solved(
        self, case: AlgorithmCase, weight: Tensor, statistics: tuple[Statistics, ...]
    ) -> Solved | None:
        empty = torch.empty(case.stored_shape, dtype=case.dtype, device="meta")
        reason = self.record.refuses(empty, self.config, case.target())
        found: Any = reason or self.record.solve(weight, statistics, self.config, case.target())
        if isinstance(found, Solved):
            return found
        text = found.reason if isinstance(found, Skip) else found
        assert isinstance(text, str), f"{self._who(case)} answers {found!r}; answer Solved or Skip"
        assert len(text.split()) >= 3, f"{self._who(case)} refuses, not with a sentence: {text!r}"
        plain = (case.shape, case.dtype) == self.cases[0]
        assert not plain, f"{self._who(case)} refuses: {text}; set `cases`"
        return None

    @property
    def _needs(self) -> tuple[Any, ...]:
        return self.record.needs(self.config)

    def _who(self, case: object) -> str:
        return f"algorithm {self.record.name!r} for {case}"

    # -- the record ------------------------------------------------------------------------------

    def test_record(self) -> None:
        """It needs statistics of different names; its configuration hashes, and goes through JSON."""
        names = [each.name for each in self._needs]
        assert names, f"config={self.config!r} needs no data; give one that does"
        assert len(set(names)) == len(names), f"two statistics of one name: {names}"
        assert config_from_json(config_to_json(self.config)) == self.config
        assert hash(self.config) == hash(copy.deepcopy(self.config))

    # -- a function of a weight and of statistics ------------------------------------------------

    def test_answer(self, case: AlgorithmCase) -> None:
        """Finite values of the weight's shape, which the declared configuration can hold."""
        weight = case.weight()
        solved = self.solved(case, case.inputs())
        if solved is None:
            return
        self._check_finite(case, solved, "")
        if not isinstance(solved.values, QTensor):
            shape = case.shape if solved.values is None else tuple(solved.values.shape)
            assert shape == case.shape, f"{self._who(case)}: values are {shape}"
            return
        stored = tuple(solved.values.shape), solved.values.dtype
        assert stored == (case.stored_shape, case.dtype), f"{self._who(case)}: values are {stored}"
        assert solved.config is not None, (
            f"{self._who(case)}: give Solved.config beside a QTensor, which it is compared with"
        )
        expected = case.rounded(solved.config, weight)
        assert isinstance(expected, QTensor)
        formats = (solved.values.spec.dtype, expected.spec.dtype)
        assert formats[0] == formats[1], (
            f"{self._who(case)}: values are {formats[0]}, and Solved.config says {formats[1]}"
        )

    def _check_finite(self, case: AlgorithmCase, solved: Solved, of: str) -> None:
        new = case.applied(solved, case.weight())
        assert bool(torch.isfinite(new).all()), f"{self._who(case)}{of}: values have NaN or inf"

    def test_deterministic(self, case: AlgorithmCase) -> None:
        """The same weight and statistics give the same bits; neither is changed, nor anything global."""
        weight, statistics = case.weight(), statistics_of(self._needs, case.inputs())
        before = [as_bytes(each).clone() for each in _memory(weight, statistics)]
        changes: list[str] = []
        with restored(changes):
            first, second = (self._solved(case, weight, statistics) for _ in range(2))
        after = [as_bytes(each) for each in _memory(weight, statistics)]
        assert all(map(torch.equal, before, after)), f"{self._who(case)} changes its input"
        assert not changes, f"{self._who(case)} changed {', '.join(changes)}"
        if first is not None and second is not None:
            assert same_answers(first, second), f"{self._who(case)}: two calls differ"

    def test_strides(self, case: AlgorithmCase) -> None:
        """A weight that is stored the other way round, as some linear layers do, has the same answer."""
        weight, statistics = case.weight(), statistics_of(self._needs, case.inputs())
        other = weight.transpose(1, 2).contiguous().transpose(1, 2)
        found = [self._solved(case, each, statistics) for each in (weight, other)]
        if found[0] is not None and found[1] is not None:
            new, again = (case.applied(each, weight) for each in found if each is not None)
            torch.testing.assert_close(again, new, rtol=1e-6, atol=1e-6)

    def test_statistics(self, case: AlgorithmCase) -> None:
        """Rows that come in one batch or in three have the same statistics, but for rounding."""
        inputs = case.inputs()
        whole, parts = (statistics_of(self._needs, inputs, pieces) for pieces in (1, 3))
        for one, other in zip(whole, parts, strict=True):
            assert one.rows == other.rows
            for key, value in one.values.items():
                near = torch.allclose(
                    other[key].double(), value.double(), rtol=1e-4, atol=1e-4 * _largest(value)
                )
                assert near, (
                    f"{self._who(case)}: statistic {key!r} of three batches and of one differ"
                )

    def test_resumed_statistics(self, case: AlgorithmCase) -> None:
        """Statistics that were saved after some batches and then went on: the same bits."""
        need, inputs = self._needs, case.inputs()
        whole = statistics_of(need, inputs, pieces=2)
        resumed = []
        for x in inputs:
            first, second = x.chunk(2)
            state = Statistics(need).add(first).state_dict()
            resumed.append(Statistics.restored(need, state).add(second))
        found = [self._solved(case, case.weight(), each) for each in (whole, tuple(resumed))]
        if found[0] is not None and found[1] is not None:
            assert same_answers(found[0], found[1]), f"{self._who(case)}: differs after a resume"

    def test_merged_statistics(self, case: AlgorithmCase) -> None:
        """Rows in one batch, and merged from three ranks in two orders, one without rows: the same worth."""
        need, inputs, weight = self._needs, case.inputs(), case.weight()
        ranks = [[Statistics(need).add(part) for part in x.chunk(3)] for x in inputs]
        none = Statistics(need)
        left = tuple(merged([none, a, b, c]) for a, b, c in ranks)
        right = tuple(a.merge(b.merge(c.merge(none))) for a, b, c in ranks)
        several = (statistics_of(need, inputs), left, right)
        found = [self._solved(case, weight, each) for each in several]
        first = found[0]
        if first is None:
            return
        for other in found[1:]:
            assert other is not None, f"{self._who(case)}: refuses merged statistics"
            assert nearly_equal(first.config, other.config), (
                f"{self._who(case)}: found {other.config!r} of merged statistics, else {first.config!r}"
            )
            errors = [
                case.error(case.applied(each, weight) - weight.double(), inputs)
                for each in (first, other)
            ]
            assert errors[1] == pytest.approx(errors[0], rel=0.1, abs=1e-9), (
                f"{self._who(case)}: the error is {errors[1]:.3g} with merged statistics, "
                f"else {errors[0]:.3g}"
            )

    @pytest.mark.parametrize("dead", ["one column", "all columns", "few rows", "one row"])
    def test_poor_statistics(self, dead: str, case: AlgorithmCase) -> None:
        """Columns that are always 0, and fewer rows than columns: the values are finite all the same."""
        inputs = case.inputs({"few rows": 3, "one row": 1}.get(dead))
        for x in inputs:
            if dead.endswith("columns"):
                x.zero_()
            elif dead == "one column":
                x[:, 2] = 0
        if (solved := self.solved(case, inputs)) is not None:
            self._check_finite(case, solved, f", {dead} of inputs")

    def test_error(self, case: AlgorithmCase) -> None:
        """The outputs on the calibration data are no worse than by rounding to nearest, and not exact."""
        weight, inputs = case.weight(), case.inputs()
        solved = self.solved(case, inputs)
        if solved is None:
            return
        if solved.config is None:
            plain = self.nearest(weight).double()
        else:
            plain = case.applied(Solved(config=solved.config), weight)
        new = case.applied(solved, weight)
        own, nearest = (case.error(each - weight.double(), inputs) for each in (new, plain))
        low, high = self.error_range
        assert low * nearest <= own <= high * nearest * (1 + 1e-6), (
            f"{self._who(case)}: {own / nearest if nearest else own:.3f} of the error of rounding to "
            f"nearest, `error_range` is {self.error_range}"
        )

    # -- models ----------------------------------------------------------------------------------

    def model(self) -> nn.Sequential:
        """Two linear layers (64 -> 48 -> 33), and a layer that no data reaches."""
        model = SUBJECTS[0].model()
        assert isinstance(model, nn.Sequential)
        model[1].unused = nn.Linear(16, 16)
        with torch.no_grad():
            for seed, parameter in enumerate(model[1].parameters()):
                parameter.copy_(gaussian(parameter.shape, seed=seed) / 4)
        return model.eval()

    def data(self) -> list[Tensor]:
        """Batches for `model`."""
        return list(calibration_rows(256, 64).chunk(4))

    def calibrated(self, model: nn.Module, data: Sequence[Tensor]) -> Report:
        """Apply the configuration."""
        return quantize_(model, self.config, _everything, data=list(data))

    def test_model(self) -> None:
        """Weights change by the data, the same twice; one that it never reached stays, and says so."""
        dense, data = self.model(), self.data()
        model, again = self.model(), self.model()
        report = self.calibrated(model, data)
        self.calibrated(again, data)
        status = {r.fqn: (r.status, r.reason) for r in report}
        assert status["0.weight"][0] == status["2.weight"][0] == "changed", status
        assert status["1.unused.weight"] == ("skipped", UNSEEN), status["1.unused.weight"]
        assert all(r.rows == 256 for r in report.with_status("changed"))
        x = torch.cat(data)
        assert torch.equal(model(x), again(x)), "two runs on the same data differ"
        quality, (low, high) = float(sqnr(dense(x), model(x))), self.sqnr_range
        assert low <= quality <= high, (
            f"algorithm {self.record.name!r}: the output has {quality:.1f} dB, `sqnr_range` is "
            f"{self.sqnr_range}"
        )

    def test_bfloat16_model(self) -> None:
        """A model in bfloat16 stays one."""
        model = self.model().bfloat16()
        report = self.calibrated(model, [x.bfloat16() for x in self.data()])
        assert report.with_status("changed")
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert bool(torch.isfinite(model(self.data()[0].bfloat16())).all())

    def test_every_kind_of_layer(self, subject: Subject) -> None:
        """One record for each parameter; what does not change says why, and keeps its bits."""
        dense, model, x = subject.model(), subject.model(), subject.input()
        report = self.calibrated(model, [x, x])
        assert [r.fqn for r in report] == [name for name, _ in dense.named_parameters()]
        for each in report:
            if each.status != "changed":
                assert len(each.reason.split()) >= 3, f"{each.fqn}: {each.reason!r}"
                assert same_bits(model.get_parameter(each.fqn), dense.get_parameter(each.fqn))
        assert bool(torch.isfinite(model(x)).all())

    def test_nothing_is_written_before_the_end(self) -> None:
        """Where the last weight fails, the model is what it was, and the error names that weight."""
        model, dense, calls = self.model(), self.model(), [0]
        kept = dict(model.named_parameters())

        def solve(weight: Tensor, statistics: Any, config: Any, target: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise QuantizationError("the last weight fails")
            return solve_(weight, statistics, config, target)

        solve_ = self.record.solve
        with (
            registered(replace(self.record, solve=solve, solve_block=None)),
            pytest.raises(QuantizationError, match=r"2\.weight.*the last weight fails"),
        ):
            self.calibrated(model, self.data())
        for name, parameter in model.named_parameters():
            assert parameter is kept[name], f"{name} is another object"
            assert same_bits(parameter, dense.get_parameter(name)), f"{name} has other values"
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_errors_name_the_weight(self) -> None:
        """NaN in a weight, or in its inputs, is an error that names the weight; no data is one, too."""
        model, data = self.model(), self.data()
        with pytest.raises(ConfigError, match=r"data=batches"):
            quantize_(model, self.config, _everything)
        with pytest.raises(QuantizationError, match=r"0\.weight"):
            self.calibrated(model, [data[0] * torch.nan])
        assert not any(isinstance(p, QTensor) for p in model.parameters())
        with torch.no_grad():
            model.get_parameter("2.weight")[3, 5] = torch.nan
        with pytest.raises(QuantizationError, match=r"2\.weight"):
            self.calibrated(model, data)
        assert not any(isinstance(p, QTensor) for p in model.parameters())


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() and value.is_floating_point() else 0.0


def _memory(weight: Tensor, statistics: Sequence[Statistics]) -> list[Tensor]:
    return [weight, *(value for each in statistics for value in each.values.values())]
