"""Random linear layers of every recipe, beside float64; and what that comparison finds."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SCRIPT = Path(__file__).with_name("random_matmuls.py")
spec = spec_from_file_location("random_matmuls", SCRIPT)
assert spec is not None
assert spec.loader is not None
MATMULS = module_from_spec(spec)
spec.loader.exec_module(MATMULS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_matmuls(seed: int) -> None:
    """More of them: `python random_matmuls.py --cases 20000 --seed 4`."""
    cases = [MATMULS.draw(seed, number) for number in range(100)]
    known = [case for case in cases if MATMULS.exemption(case)]
    assert len(known) <= 20
    found = [
        (case, MATMULS.problem_of(case, MATMULS.make_layer(case)))
        for case in cases
        if case not in known
    ]
    wrong = [f"{case}: {problem}" for case, problem in found if problem]
    assert not wrong, "\n".join(wrong)


def test_a_layer_is_called_with_other_activations() -> None:
    """Each call is compared; what it draws depends on the case and its number alone."""
    first = MATMULS.draw(4, 0)
    made = MATMULS.make_layer(first)
    calls = [MATMULS.again(first, call) for call in range(20)]
    assert calls[0] == first
    assert calls[7] == MATMULS.again(first, 7)
    assert len({call.m for call in calls}) > 4
    assert {(call.recipe, call.n, call.k, call.seed) for call in calls} == {
        (first.recipe, first.n, first.k, first.seed)
    }
    assert [MATMULS.problem_of(c, made) for c in calls if not MATMULS.exemption(c)].count("") > 10
    other = made._replace(values=made.values + 1)
    assert any(MATMULS.problem_of(call, other) for call in calls)


def test_cases_are_of_all_kinds() -> None:
    """What is drawn meets every recipe, dtype, shape, and end of the dtype."""
    cases = [MATMULS.draw(1, number) for number in range(2000)]
    assert {case.recipe for case in cases} == set(MATMULS.recipes())
    assert len(MATMULS.recipes()) >= 45
    assert {case.dtype for case in cases} == set(MATMULS.DTYPES)
    assert {case.shape for case in cases} == set(MATMULS.SHAPES)
    assert {case.weight for case in cases} == set(MATMULS.WEIGHTS)
    assert {what for case in cases for what in case.rows.values()} == set(MATMULS.ROWS)
    assert {case.dims for case in cases} == {1, 2, 3, 4}
    assert {case.bias for case in cases} == {True, False}
    assert {0, 1} < {case.m for case in cases}
    assert max(case.m for case in cases) > 900
    assert any(case.k % 2 for case in cases)


FAULTS = {
    "a small row of the weight": ("relative error of a ", lambda out: out[:, 3].mul_(1.2)),
    "a small token": ("relative error of a ", lambda out: out[2].mul_(1.1)),
    "all": ("relative error of ", lambda out: out.mul_(1.1)),
    "what a token of zeros makes": ("activations of zeros", lambda out: out[4].add_(1e-3)),
    "what a row of zeros makes": ("weights of zeros", lambda out: out[0, 5].add_(1e-3)),
    "a NaN": ("1 outputs of 140 are not finite", lambda out: out[1, 1].fill_(torch.nan)),
    "a row beside an infinity": ("not finite", lambda out: out[1, :3].fill_(torch.inf)),
    "an infinity that is none": ("not as dense", lambda out: out[6, 1].fill_(6e4)),
    "an infinity of the other sign": ("not as dense", lambda out: out[6].neg_()),
    "a number beyond the dtype": ("not an infinity", lambda out: out[7, 7].fill_(1.0)),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_are_found(fault: str | None) -> None:
    """Of a row that is a thousandth of the others, too."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 64, generator=generator), torch.randn(20, 64, generator=generator)
    w[3] *= 1e-3
    w[5], x[2], x[4] = 0, x[2] * 1e-3, 0
    x[6, 10] = torch.inf
    x[7], w[7] = 0, 0
    x[7, :2], w[7, :2] = 6e4, 0.8
    x, w = x.half(), w.half()
    out = F.linear(x.double(), w.double()).half()
    case = MATMULS.Case(
        number=0, call=0, recipe="", dtype=torch.float16, m=8, n=20, k=64, dims=2, bias=False, weight="",
        zeros=(), shape="whole", rows={}, seed=0,
    )  # fmt: skip
    said = ""
    if fault is not None:
        said, change = FAULTS[fault]
        change(out)
    least = MATMULS.least_weight(torch.float16)
    found = MATMULS.compare(case, x, out, w.double(), None, None, [5], least, spills=False)
    assert said in found
    assert bool(found) == (fault is not None), found
    if fault is None:
        out[5] = torch.nan  # the row before an infinity
        found = MATMULS.compare(case, x, out, w.double(), None, None, [5], least, spills=True)
        assert not found
