"""`TransformSuite`: what `quantize_` with a configuration must do to a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ao_core.checkpoints.rows import by_rows
from ao_core.config import (
    Config,
    config_from_json,
    config_from_yaml,
    config_to_json,
    config_to_yaml,
)
from ao_core.dequantize import dequantize_
from ao_core.errors import QuantizationError
from ao_core.numerics import sqnr
from ao_core.quantize import quantize_
from ao_core.records import Skip, Target
from ao_core.registry import registry
from ao_core.report import Report
from ao_core.tensor import QTensor
from ao_core.testing.base import Suite, gaussian, same_bits

__all__ = ["Experts", "Subject", "TransformSuite"]


class Experts(nn.Module):
    """Three experts in one fused parameter, each a matmul of (32 -> 16), multiplied as layers of them do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        """All experts on all rows."""
        offs = torch.arange(1, 4, dtype=torch.int32) * len(x)
        rows: Tensor = torch._grouped_mm(x.repeat(3, 1), self.weight.transpose(-2, -1), offs=offs)
        return rows.view(3, len(x), 16)


class Attention(nn.Module):
    """Self-attention whose forward takes one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The attended values."""
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


@dataclass(frozen=True)
class Subject:
    """A kind of layer and an input for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    #: inputs are ids below 20 in place of Gaussian values
    ids: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """The layer with Gaussian parameters of the usual size, the same for the same seed."""
        model = self.build()
        with torch.no_grad():
            for offset, parameter in enumerate(model.parameters()):
                values = gaussian(parameter.shape, seed=1000 * seed + offset)
                parameter.copy_(values / max(parameter[0].numel(), 1) ** 0.5)
        return model

    def input(self) -> Tensor:
        """A batch."""
        if self.ids:
            return torch.arange(torch.Size(self.shape).numel()).reshape(self.shape) % 20
        return gaussian(self.shape, seed=77)

    def __str__(self) -> str:
        return self.name


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        "linear", lambda: nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 33)), (5, 64)
    ),
    Subject("odd_linear", lambda: nn.Linear(70, 33, bias=False), (2, 3, 70)),
    Subject("embedding", lambda: nn.Embedding(20, 64), (4, 5), ids=True),
    Subject("conv1d", lambda: nn.Conv1d(8, 6, 3, padding=1), (2, 8, 10)),
    Subject("conv2d", lambda: nn.Conv2d(8, 6, 3, stride=2, groups=2), (2, 8, 9, 9)),
    Subject("attention", Attention, (2, 7, 32)),
    Subject("experts", Experts, (5, 32)),
)


class TransformSuite(Suite):
    """Tests of a configuration on every kind of layer.

    Attributes:
        config: an instance of the configuration.
        sqnr_range: what the SQNR of a quantized model's output may be, in dB; a result above the
            range would mean that nothing is quantized.
        subjects: the layers to try; at least one must be quantized.
    """

    config: Config
    sqnr_range: tuple[float, float] = (2.0, 75.0)
    subjects: Sequence[Subject] = SUBJECTS

    def arguments(self) -> dict[str, Sequence[Any]]:
        """`subject`: all."""
        return {"subject": self.subjects}

    def quantized(self, subject: Subject, seed: int = 0) -> tuple[nn.Module, Report]:
        """A model to which the configuration was applied wherever it has a matrix."""
        model = subject.model(seed)
        return model, quantize_(model, self.config, lambda module, name: True)

    # -- the configuration -----------------------------------------------------------------------

    def test_json(self) -> None:
        """JSON, and YAML where it is installed, give an equal configuration back."""
        assert config_from_json(config_to_json(self.config)) == self.config
        if find_spec("yaml"):
            assert config_from_yaml(config_to_yaml(self.config)) == self.config
        assert hash(self.config) == hash(copy.deepcopy(self.config))

    def test_quantizes_something(self) -> None:
        """At least one of the subjects changes."""
        reports = [self.quantized(subject)[1] for subject in self.subjects]
        assert any(report.with_status("changed") for report in reports)

    @pytest.mark.parametrize("shape", [(300, 64), (3, 150, 32)], ids=["matrix", "experts"])
    def test_rows_by_themselves(self, shape: tuple[int, ...]) -> None:
        """Some rows get the codes that they get among others, unless the format has one scale for all.

        `quantize_checkpoint` relies on it: it takes large weights some rows at a time.
        """
        weight, target = gaussian(shape, seed=5), Target("weight", nn.Linear(64, 300), "weight")

        def apply(rows: Tensor) -> Tensor | Skip:
            try:
                return registry.transform_for(type(self.config)).apply(rows, self.config, target)
            except QuantizationError as error:  # `quantize_` skips the parameter, too
                return Skip(str(error))

        whole, pieces = apply(weight), by_rows(weight, apply, elements=1)
        assert type(whole) is type(pieces)
        if isinstance(whole, QTensor) and isinstance(pieces, QTensor):
            assert whole.spec == pieces.spec
            for (name, a), (_, b) in zip(whole.leaves(), pieces.leaves(), strict=True):
                assert same_bits(a, b), name

    # -- the report ------------------------------------------------------------------------------

    def test_all_is_reported(self, subject: Subject) -> None:
        """One record per parameter; what is not quantized says why, in words."""
        dense = subject.model()
        model, report = self.quantized(subject)
        assert [r.fqn for r in report] == [name for name, _ in dense.named_parameters()]
        for record in report:
            new, old = model.get_parameter(record.fqn), dense.get_parameter(record.fqn)
            assert record.shape == tuple(new.shape) == tuple(old.shape)
            assert record.status in ("changed", "unchanged", "skipped")
            if record.status == "changed":
                assert type(new.data) is not Tensor
                assert not record.reason
            else:
                assert len(record.reason.split()) >= 3, f"{record.fqn}: {record.reason!r}"
                assert same_bits(new, old)

    def test_bytes(self, subject: Subject) -> None:
        """Bytes before and after are those in memory; a quantized weight is smaller."""
        model, report = self.quantized(subject)
        for record in report:
            parameter = model.get_parameter(record.fqn)
            assert record.bytes_before == parameter.numel() * parameter.element_size()
            if isinstance(parameter, QTensor):
                assert record.bytes_after == parameter.stored_bytes < record.bytes_before
            else:
                assert record.bytes_after == record.bytes_before
        assert report.bytes_after == sum(record.bytes_after for record in report)
        assert Report.from_json(report.to_json()).to_dict() == report.to_dict()

    def test_strict(self, subject: Subject) -> None:
        """With strict=True a skipped weight is an error that names it, and nothing changes."""
        _, report = self.quantized(subject)
        model, dense = subject.model(), subject.model()
        skipped = report.with_status("skipped")
        if not skipped:
            strict = quantize_(model, self.config, lambda module, name: True, strict=True)
            assert [r.status for r in strict] == [r.status for r in report]
            return
        with pytest.raises(QuantizationError, match=skipped[0].fqn):
            quantize_(model, self.config, lambda module, name: True, strict=True)
        for new, old in zip(model.parameters(), dense.parameters(), strict=True):
            assert same_bits(new, old)

    # -- the model -------------------------------------------------------------------------------

    def test_output(self, subject: Subject) -> None:
        """Near the dense output, but not equal; exactly equal where nothing was quantized."""
        dense, x = subject.model(), subject.input()
        model, report = self.quantized(subject)
        actual, expected = model(x), dense(x)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        if not report.with_status("changed"):
            assert torch.equal(actual, expected)
            return
        low, high = self.sqnr_range
        assert low <= float(sqnr(expected, actual)) <= high

    def test_dequantized_model(self, subject: Subject) -> None:
        """dequantize_ gives dense parameters with the same values: equal outputs if only weights are cast."""
        model, _ = self.quantized(subject)
        x = subject.input()
        weights = [p for p in model.parameters() if isinstance(p, QTensor)]
        expected = model(x)
        names = dequantize_(model)
        assert len(names) == len(weights)
        assert not any(isinstance(p, QTensor) for p in model.parameters())
        if weights and all(weight.spec.act is None for weight in weights):
            assert float(sqnr(expected, model(x))) > 90

    def test_twice(self, subject: Subject) -> None:
        """The second time changes nothing, and says so."""
        model, first = self.quantized(subject)
        x = subject.input()
        expected = model(x)
        kept = dict(model.named_parameters())
        second = quantize_(model, self.config, lambda module, name: True)
        assert not second.with_status("changed")
        for record in first.with_status("changed"):
            (again,) = [r for r in second if r.fqn == record.fqn]
            assert again.reason
            assert model.get_parameter(record.fqn) is kept[record.fqn]
        assert torch.equal(model(x), expected)

    def test_gradient_of_the_input(self, subject: Subject) -> None:
        """Gradients reach the input: those of the stored weights, or near those of the dense model."""
        if subject.ids:
            model, _ = self.quantized(subject)
            assert not model(subject.input()).isnan().any()
            return
        model, _ = self.quantized(subject)
        reference, floor = subject.model(), self.sqnr_range[0]
        weights = [p for p in model.parameters() if isinstance(p, QTensor)]
        if weights and all(weight.spec.act is None for weight in weights):
            reference, floor = copy.deepcopy(model), 90.0
            dequantize_(reference)
        grads = []
        for each in (reference, model):
            x = subject.input().requires_grad_(True)
            out = each(x)
            (out * gaussian(out.shape, seed=3)).sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        assert float(sqnr(*grads)) >= floor

    def test_gradient_in_mixed_precision(self, subject: Subject) -> None:
        """Float32 weights under autocast: the gradient is that of the same model in full precision, rounded.

        A block that is computed again in the backward pass gives the same one.
        """
        if subject.ids:
            return
        model, _ = self.quantized(subject)

        def gradient(autocast: bool, again: bool) -> Tensor:
            x = subject.input().requires_grad_(True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = checkpoint(model, x, use_reentrant=False) if again else model(x)
            (out.float() * gaussian(out.shape, seed=3)).sum().backward()
            assert x.grad is not None
            return x.grad

        mixed = gradient(autocast=True, again=False)
        quantized = [p for p in model.parameters() if isinstance(p, QTensor)]
        # activations that are a little different may have other codes
        floor = 20.0 if all(w.spec.act is None for w in quantized) else self.sqnr_range[0]
        assert float(sqnr(gradient(autocast=False, again=False), mixed)) >= floor
        assert torch.equal(mixed, gradient(autocast=True, again=True))

    def test_ties_are_kept(self) -> None:
        """A tensor with two owners is one tensor afterwards, with one record."""
        first, second = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
        second.weight = first.weight
        model = nn.Sequential(first, second)
        report = quantize_(model, self.config, lambda module, name: True)
        assert first.weight is second.weight
        assert len(report.records) == 1
        assert report.records[0].tied == ("1.weight",)

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_state_dict(self, assign: bool, subject: Subject) -> None:
        """Into another model quantized alike: equal outputs."""
        source, _ = self.quantized(subject)
        target, _ = self.quantized(subject, seed=1)
        x = subject.input()
        assert not torch.equal(target(x), source(x))
        target.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(target(x), source(x))
        assert torch.equal(copy.deepcopy(source)(x), source(x))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_bad_weights(self, bad: float) -> None:
        """NaN and inf are refused by name, and leave the model as it was."""
        last = nn.Linear(16, 16)
        model = nn.Sequential(nn.Linear(64, 16), last)
        with torch.no_grad():
            last.weight[3, 5] = bad
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(QuantizationError, match=r"1\.weight"):
            quantize_(model, self.config)
        for new, old in zip(model.parameters(), before, strict=True):
            assert same_bits(new, old)
