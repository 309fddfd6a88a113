"""`AlgorithmSuite` passes for two correct algorithms, and fails for each with one defect."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from ao_core import Algorithm, Config, Skip, Solved, WeightOnlyConfig
from ao_core.calibration.statistics import HESSIAN, SQUARES
from ao_core.errors import AoError, ConfigError
from ao_core.spec import ROW, Spec
from ao_core.tensor import quantize_tensor
from ao_core.testing import AlgorithmSuite
from ao_core.testing.base import run
from ao_core.testing.registered import registered
from ao_core.weights import is_conv

INT4 = WeightOnlyConfig("int4")
SPEC = Spec("int4", ROW, "float32", layout="packed")


@dataclass(frozen=True)
class Clipped(Config):
    """int4 by row, of values that are clipped where the outputs lose least by it."""


def clip(weight, statistics, config, target):
    squares = torch.stack([each["squares"] for each in statistics])
    best, least = weight, torch.full(weight.shape[:2], torch.inf, dtype=torch.float64)
    for share in (1.0, 0.9, 0.8, 0.7):
        bound = weight.abs().amax(-1, keepdim=True) * share
        clipped = weight.clamp(-bound, bound)
        change = quantize_tensor(clipped, SPEC).dequantize().double() - weight.double()
        error = (change.square() * squares[:, None].to(weight.device)).sum(-1)
        best = torch.where((error < least)[..., None], clipped, best)
        least = torch.minimum(error, least)
    return Solved(best, INT4)


@dataclass(frozen=True)
class InTurn(Config):
    """int4 by row: what rounding a column loses is made up for by the columns after it."""


def in_turn(weight, statistics, config, target):
    """Optimal brain quantization in order, with a `QTensor` as its answer."""
    stored = weight if len(weight) > 1 else weight[0]
    scale = quantize_tensor(stored.contiguous(), SPEC).scale
    out = weight.double()
    for e, each in enumerate(statistics):
        hessian, step = each["hessian"], scale.double().view(*weight.shape[:2], 1)[e]
        mean = float(hessian.diagonal().mean())
        damped = hessian + (0.01 * mean or 1.0) * torch.eye(len(hessian)).double()
        factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
        rest = out[e]
        for k in range(rest.shape[1]):
            column = (rest[:, k : k + 1] / step).round().clamp(-8, 7) * step
            rest[:, k:] -= (rest[:, k : k + 1] - column) / factor[k, k] * factor[k, k:]
            rest[:, k : k + 1] = column
    values = out.to(weight.dtype).reshape(stored.shape)
    return Solved(quantize_tensor(values, SPEC, scale=scale), INT4, damping=0.01)


def in_turn_refuses(weight, config, target):
    return "it holds the filters of a convolution" if is_conv(weight, target) else None


def algorithm(config, needs, solve, **fields):
    return Algorithm(config.__name__.lower(), config, lambda config: needs, solve, **fields)


CLIPPED = algorithm(Clipped, (SQUARES,), clip, sequential=False)
IN_TURN = algorithm(InTurn, (HESSIAN,), in_turn, refuses=in_turn_refuses)


class TestClipped(AlgorithmSuite):
    records = (CLIPPED,)
    config = Clipped()


class TestInTurn(AlgorithmSuite):
    records = (IN_TURN,)
    config = InTurn()


def changed(change):
    """The correct algorithm, its values changed afterwards."""

    def solve(weight, statistics, config, target):
        found = clip(weight, statistics, config, target)
        return replace(found, values=change(found.values, statistics))

    return solve


def spoils(weight, statistics, config, target):
    found = clip(weight, statistics, config, target)
    weight.clamp_(-0.1, 0.1)
    return found


def spoils_statistics(weight, statistics, config, target):
    for each in statistics:
        each["squares"].div_(each.rows)
    return clip(weight, statistics, config, target)


def draws(weight, statistics, config, target):
    noise = torch.rand(weight.shape) * 1e-2
    return Solved(weight * (1 - noise).to(weight), INT4)


def raises_for_one_row(weight, statistics, config, target):
    if weight.shape[1] == 1:
        return Skip("too small")
    return clip(weight, statistics, config, target)


def of_first(weight, statistics, config, target):
    return clip(weight, (statistics[0],) * len(statistics), config)


def by_columns(values, statistics):
    """Divides by the norm of each column, which may be 0."""
    norm = torch.stack([each["squares"] for each in statistics]).sqrt().to(values)
    return values * norm[:, None] / norm[:, None]


def as_batches(values, statistics):
    """Shrinks by how many rows there are, as if each batch had eight."""
    return values * (1 - 0.4 / statistics[0].rows)


#: defect -> (the function, the test that fails, its message)
BROKEN = {
    "worse than rounding": (
        lambda w, s, c, t: Solved(w.clamp(-0.05, 0.05), INT4),
        "test_error",
        "of the error of rounding to nearest, `error_range` is",
    ),
    "does nothing": (
        changed(lambda values, s: values * 0),
        "test_error",
        "of the error of rounding to nearest",
    ),
    "leaves values dense": (
        lambda w, s, c, t: Solved(w),
        "test_error",
        "Solved.config is None, so there is no rounding to nearest",
    ),
    "changes the weight": (spoils, "test_deterministic", "'clipped' for .* changes its input"),
    "changes the statistics": (spoils_statistics, "test_deterministic", "changes its input"),
    "draws random numbers": (draws, "test_deterministic", "changed torch's random numbers"),
    "NaN for a dead column": (changed(by_columns), "test_poor_statistics", "one column of inputs"),
    "loses a dimension": (
        changed(lambda values, s: values[0]), "test_answer", r"values are \(48, 64\)",
    ),
    "short refusals": (raises_for_one_row, "test_answer", "refuses, not with a sentence"),
    "always refuses": (
        lambda w, s, c, t: Skip("it is not in the mood"), "test_answer", "not in the mood; set `cases`",
    ),
    "another answer type": (lambda w, s, c, t: w, "test_answer", "answer Solved or Skip"),
}  # fmt: skip


@pytest.mark.parametrize("defect", BROKEN)
def test_broken(defect):
    solve, test, match = BROKEN[defect]
    for record in (CLIPPED, replace(CLIPPED, solve=solve)):
        suite = type("Suite", (AlgorithmSuite,), {"records": (record,), "config": Clipped()})
        with registered(record):
            if record is CLIPPED:
                run(suite, test)
                continue
            with pytest.raises((AssertionError, AoError), match=match):
                run(suite, test)


#: statistics with one defect
def _of(rows, before):
    return {"squares": rows.double().square().sum(0)}


UNMERGED = replace(SQUARES, name="last", of=_of, merge=lambda a, b: b)
HALVES = replace(
    SQUARES, name="mean", of=_of, merge=lambda a, b: {"squares": (a["squares"] + b["squares"]) / 2}
)


@pytest.mark.parametrize("statistic", [UNMERGED, HALVES], ids=lambda s: s.name)
def test_statistics_that_do_not_merge(statistic):
    for needs in ((SQUARES,), (statistic,)):
        record = algorithm(Clipped, needs, clip)
        suite = type("Suite", (AlgorithmSuite,), {"records": (record,), "config": Clipped()})
        with registered(record):
            if needs == (SQUARES,):
                run(suite, "test_statistics")
                continue
            match = "statistic 'squares' of three batches and of one differ"
            with pytest.raises(AssertionError, match=match):
                run(suite, "test_statistics")


def raising(error):
    def solve(weight, statistics, config, target):
        raise error

    return solve


@pytest.mark.parametrize(
    ("solve", "text"),
    [
        (raising(ZeroDivisionError("no rows")), "0.weight: .* 'clipped' raised ZeroDivisionError"),
        (raising(ConfigError("steps=0: too few")), "0.weight: steps=0: too few"),
        (lambda w, s, c, t: w, "0.weight: .* 'clipped' answered a Tensor, not Solved or Skip"),
        (
            lambda w, s, c, t: Solved(w[0]),
            r"0.weight: .* has the shape \(48, 64\), not \(1, 48, 64\)",
        ),
        (
            lambda w, s, c, t: Solved(quantize_tensor(w.mT.contiguous(), SPEC), INT4),
            r"0.weight: .* has the shape \(1, 64, 48\), not \(48, 64\)",
        ),
    ],
    ids=["error", "configuration", "answer", "values", "codes"],
)
def test_what_goes_wrong_names_the_weight(solve, text):
    suite = type("Suite", (AlgorithmSuite,), {"config": Clipped()})()
    model = suite.model()
    with registered(replace(CLIPPED, solve=solve)), pytest.raises(AoError, match=text):
        suite.calibrated(model, suite.data())
    assert all(type(p) is nn.Parameter for p in model.parameters())
