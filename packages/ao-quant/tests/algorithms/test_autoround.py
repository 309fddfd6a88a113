"""AutoRound against its own mathematics: rounding to nearest, brute force, gradients by hand."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, QTensor, Spec, Target, quantize_, quantize_tensor
from ao_core.ext import ConfigError
from ao_core.ext.calibration import HESSIAN, Statistics
from ao_core.testing.layout_values import same_parts
from ao_quant import (
    AutoRoundConfig,
    GGUFWeightOnlyConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    IntxWeightOnlyConfig,
    NF4WeightOnlyConfig,
    UIntxWeightOnlyConfig,
)
from ao_quant.algorithms.autoround import solve_autoround
from ao_quant.algorithms.descent import descend
from ao_quant.algorithms.rounding import Problem, Rounding, problem_of, rounded, signs, stepped

FORMATS = [
    UIntxWeightOnlyConfig(2, 32),
    IntxWeightOnlyConfig(3, 32, symmetric=True),
    UIntxWeightOnlyConfig(3, 32, zero_point="float"),
    Int4WeightOnlyConfig(32, symmetric=True),
    IntxWeightOnlyConfig(8, "row", symmetric=True),
    IntxWeightOnlyConfig(2, 32, block_rows=16),
]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(blocks))).eval()


def batches(count=6, rows=40):
    torch.manual_seed(1)
    mix = torch.eye(32) + torch.randn(32, 32) / 6
    return [torch.randn(rows, 32) @ mix for _ in range(count)]


def weights_of(made):
    return {name: p for name, p in made.named_parameters() if isinstance(p, QTensor)}


def statistics(columns, rows=200, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x = x @ (torch.eye(columns) + torch.randn(columns, columns, generator=generator) / 3).double()
    return (Statistics((HESSIAN,)).add(x),)


@pytest.mark.parametrize("base", FORMATS, ids=str)
def test_no_steps_are_the_start_bit_for_bit(base):
    for config, other, data in (
        (AutoRoundConfig(base, iterations=0, start="nearest"), base, None),
        (AutoRoundConfig(base, iterations=0), GPTQConfig(base), batches()),
    ):
        made, expected = model(1), model(1)
        quantize_(made, config, data=batches())
        quantize_(expected, other, data=data)
        names = (
            ["0.up.weight"] if data else list(weights_of(expected))
        )  # GPTQ goes weight by weight
        for name in names:
            assert same_parts(weights_of(made)[name], weights_of(expected)[name]), name


@pytest.mark.parametrize("base", FORMATS[:4], ids=str)
@pytest.mark.parametrize("start", ["gptq", "nearest"])
def test_the_loss_of_blocks_falls_and_is_that_of_the_result(base, start):
    dense, made, data = model(), model(), batches()
    config = AutoRoundConfig(base, iterations=60, rate=0.008, start=start, batches=2)
    state = torch.get_rng_state()
    report = quantize_(made, config, data=data)
    assert torch.equal(torch.get_rng_state(), state)
    losses = {}
    for record in report.with_status("changed"):
        assert 0 < record.loss_after <= record.loss_before
        assert record.rows == 240
        assert "of 60 steps" in record.note
        losses[record.fqn.partition(".")[0]] = record.loss_after, record.loss_before
    assert losses["0"][0] <= (0.95 if start == "nearest" else 1.0) * losses["0"][1]
    with torch.no_grad():
        errors = [(made(x) - dense(x)).square().mean() for x in data]
    assert float(sum(errors) / len(errors)) == pytest.approx(losses["1"][0], rel=1e-4)
    again = model()
    quantize_(again, config, data=data)
    assert all(
        same_parts(a, b)
        for a, b in zip(weights_of(again).values(), weights_of(made).values(), strict=True)
    )
    assert all(p.grad is None for p in made.parameters())


def layer(weight, base, seen, **options):
    target = Target("layer.weight", nn.Linear(*weight.shape[:0:-1], bias=False), "weight")
    return solve_autoround(weight, seen, AutoRoundConfig(base, **options), target)


def test_it_is_between_the_best_of_all_roundings_and_the_nearest():
    """Of 2¹⁰ ways to round each row up or down on a grid that stays, which is AdaRound's problem."""
    torch.manual_seed(0)
    weight, seen = torch.randn(1, 30, 10), statistics(10)
    hessian = seen[0]["hessian"] / 200
    found = layer(
        weight,
        UIntxWeightOnlyConfig(4, "row"),
        seen,
        iterations=200,
        rate=0.0015,
        ranges=False,
        start="nearest",
    )
    q = quantize_tensor(weight[0], found.values.spec)
    problem = problem_of(weight, q, False)
    ratio = weight[0] / problem.scale + problem.zero_point
    choices = torch.tensor(list(itertools.product((0, 1), repeat=10)))
    codes = (ratio.floor()[:, None] + choices).clamp(0, 15)
    values = (codes - problem.zero_point[:, None]) * problem.scale[:, None]

    def loss(values):
        change = values.double() - (weight[0][:, None] if values.dim() == 3 else weight[0])
        return ((change @ hessian) * change).sum(-1)

    best, own = loss(values).amin(-1), loss(found.values.dequantize())
    nearest = loss(q.dequantize())
    assert bool((best <= own * (1 + 1e-6)).all())
    assert 0.2 < float(own.sum() / nearest.sum()) < 0.95
    new = (found.values.dequantize() / problem.scale + problem.zero_point).round()
    assert bool(((new - ratio).abs() < 1 + 1e-4).all())
    assert found.loss == pytest.approx((float(nearest.sum()), float(own.sum())), rel=1e-5)


def straight_through(problem, offsets, low, high):
    """Values by the formulas of the paper, through which autograd goes as if nothing was rounded."""
    least, most = problem.dtype.min, problem.dtype.max
    zero = 0.0 if problem.zero_point is None else problem.zero_point
    bottom, top = low * problem.scale * (least - zero), high * problem.scale * (most - zero)
    scale = (top - bottom) / (most - least)
    ratio = (problem.weight - bottom) / scale + offsets
    steps = (ratio + (ratio.round() - ratio).detach()).clamp(0, most - least)
    return bottom + scale * steps


@pytest.mark.parametrize(("zero", "signed"), [(None, False), (None, True), (3.0, False)])
def test_gradients_are_those_of_autograd(zero, signed):
    torch.manual_seed(2)
    spec = Spec("uint3" if zero else "int3", (1, 8))
    dtype = quantize_tensor(torch.randn(2, 8), spec).format
    weight = torch.randn(4, 16, dtype=torch.float64) * 1.3  # some are clamped
    scale = torch.rand(4, 2, dtype=torch.float64) / 4 + 0.3
    if signed:  # as importance chooses scales of integers that reach further down than up
        scale[::2] *= -1
    point = None if zero is None else torch.full((4, 2), zero, dtype=torch.float64)
    problem = Problem(weight, dtype, (1, 8), scale, point, "int" if zero else "none", None)
    shapes = [(4, 2, 8), (4, 2, 1), (4, 2, 1)]
    leaves = [
        torch.full(s, v, dtype=torch.float64, requires_grad=True)
        for s, v in zip(shapes, (0.1, 1.0, 1.0), strict=True)
    ]
    blocked = Problem(
        weight.view(4, 2, 8), dtype, (1, 8), scale[..., None], None if point is None else point[..., None],
        problem.zero_kind, None,
    )  # fmt: skip
    factors = leaves if zero else [leaves[0], leaves[1], leaves[1]]
    values = straight_through(blocked, *factors)
    gradient = torch.randn(4, 16, dtype=torch.float64)
    (values * gradient.view(4, 2, 8)).sum().backward()
    by = Rounding(torch.full_like(weight, 0.1), torch.ones_like(scale), torch.ones_like(scale))
    now = rounded(problem, by)
    torch.testing.assert_close(now.values, values.detach().view(4, 16), rtol=1e-12, atol=1e-12)
    assert 0.05 < float((~now.inside).double().mean()) < 0.6
    found = signs(problem, now, gradient)
    assert torch.equal(found.offsets, leaves[0].grad.view(4, 16).sign())
    assert torch.equal(found.low, leaves[1].grad.view(4, 2).sign())
    if zero:
        assert torch.equal(found.high, leaves[2].grad.view(4, 2).sign())


def test_one_step_by_hand():
    """0.4 and 2.6 are rounded to 0 and 3; a step against the gradient makes 1 and 2 of them."""
    dtype = quantize_tensor(torch.randn(1, 4), Spec("int4", (1, -1))).format
    weight = torch.tensor([[0.4, 2.6]], dtype=torch.float64)
    ones = torch.ones(1, 1, dtype=torch.float64)
    problem = Problem(weight, dtype, (1, -1), ones, None, "none", None)
    hessian = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)

    def gradients(step, values):
        return [(values[0] - weight) @ hessian]

    # change (-0.4, 0.4): gradient (-0.2, 0.2), so one step of 0.15 up and down gives ratios 0.55 and 2.45
    found = descend(
        [problem],
        gradients,
        lambda v: float((((v[0] - weight) @ hessian) * (v[0] - weight)).sum()),
        1,
        0.15,
    )
    now = rounded(
        problem,
        stepped(
            Rounding.nearest(problem),
            Rounding(torch.tensor([[-1.0, 1.0]]), ones * 0, ones * 0),
            0.15,
        ),
    )
    assert now.codes.tolist() == [[1.0, 2.0]]
    # (0.6, -0.6) is worse than (-0.4, 0.4), so the start is kept
    assert found.steps == 0
    assert found.before == found.after == pytest.approx(0.4**2 * (2 - 1))


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (NF4WeightOnlyConfig(), "no even steps"),
        ("mx_weight_only", "no even steps"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:nothing was converted")
def test_formats_without_even_steps_are_refused(base, reason):
    made = model(1)
    report = quantize_(made, AutoRoundConfig(base, iterations=1), data=batches(1))
    assert all(reason in r.reason for r in report.with_status("skipped"))
    assert not weights_of(made)


def test_scales_that_are_quantized_stay():
    """Blocks of GGUF: codes are learned, and scales are numbers in 6 bits."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(256, 32)).eval()
    mix = torch.eye(256) + torch.randn(256, 256) / 8
    start, data = copy.deepcopy(wide), [torch.randn(300, 256) @ mix]
    base = GGUFWeightOnlyConfig("q4_k")
    quantize_(start, base)
    quantize_(wide, AutoRoundConfig(base, iterations=50, rate=0.006, start="nearest"), data=data)
    old, new = start[0].weight.parts, wide[0].weight.parts
    assert not torch.equal(old["qdata"], new["qdata"])
    assert all(
        torch.equal(*pair)
        for pair in zip(_leaves(old["scale"]), _leaves(new["scale"]), strict=True)
    )


def _leaves(part):
    return list(part.parts.values()) if isinstance(part, QTensor) else [part]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"iterations": -1}, "iterations=-1: use 0 or more"),
        ({"batches": 0}, "batches=0: must be positive"),
        ({"rate": 0.0}, "rate=0.0: must be positive"),
        ({"momentum": 1.0}, "momentum=1.0: use a share below 1"),
        ({"start": "awq"}, "start='awq'.*'gptq', 'importance', 'nearest'"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ConfigError, match=text):
        AutoRoundConfig(**arguments)


def test_a_block_has_one_setting_and_several_formats():
    few, many = UIntxWeightOnlyConfig(2, 32), IntxWeightOnlyConfig(5, 32)
    made = model(2)
    rules = {
        "re:.*up": AutoRoundConfig(few, iterations=4),
        "*": AutoRoundConfig(many, iterations=4),
    }
    quantize_(made, FqnToConfig(rules), data=batches(2))
    assert [w.spec.dtype for w in weights_of(made).values()] == ["uint2", "uint5"] * 2
    rules["*"] = AutoRoundConfig(many, iterations=5)
    with pytest.raises(
        ConfigError, match=r"0\.up\.weight and 0\.down\.weight are learned together"
    ):
        quantize_(model(2), FqnToConfig(rules), data=batches(2))


def test_frozen_models_in_training_and_half_precision():
    made = model(2).to(torch.bfloat16).requires_grad_(False).train()
    data = [x.to(torch.bfloat16) for x in batches(3)]
    report = quantize_(made, AutoRoundConfig(UIntxWeightOnlyConfig(3, 32), iterations=4), data=data)
    assert made.training
    assert {p.dtype for p in weights_of(made).values()} == {torch.bfloat16}
    assert all(r.loss_after <= r.loss_before for r in report.with_status("changed"))


def sign_round_of_the_paper(weight, x, bits, group, iterations=200):
    """The least error of the outputs on the way of arXiv:2309.05516, algorithm 1, in float64."""
    wide = weight.unflatten(-1, (-1, group))
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    offset = torch.zeros_like(wide, requires_grad=True)
    ends = [torch.ones_like(low, requires_grad=True) for _ in range(2)]

    def straight(values):
        return values + (values.round() - values).detach()

    least = float("inf")
    for step in range(iterations + 1):
        scale = (high * ends[1] - low * ends[0]) / (2**bits - 1)
        zero = straight(-low * ends[0] / scale)
        codes = (straight(wide / scale + offset) + zero).clamp(0, 2**bits - 1)
        loss = (x @ (((codes - zero) * scale).flatten(1) - weight).t()).square().sum()
        least = min(least, float(loss.detach()))
        parameters = [offset, *ends]
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for each, gradient in zip(parameters, gradients, strict=True):
                each -= (1 - step / iterations) / iterations * gradient.sign()
            offset.clamp_(-0.5, 0.5)
            for each in ends:
                each.clamp_(0, 1)
    return least


@pytest.mark.parametrize("bits", [4, 2])
def test_as_good_as_that_of_the_paper(bits):
    """Written once more, in float64: same weight, data and format."""
    generator = torch.Generator().manual_seed(bits)
    mix = torch.eye(64, dtype=torch.float64) + torch.randn(64, 64, generator=generator) / 8
    x = torch.randn(320, 64, generator=generator).double() @ mix
    weight = torch.randn(48, 64, generator=generator) / 8
    model = nn.Sequential(nn.Linear(64, 48, bias=False)).requires_grad_(False)
    model[0].weight.copy_(weight)
    config = AutoRoundConfig(UIntxWeightOnlyConfig(bits, 32), bfloat16=False)
    quantize_(model, config, data=list(x.float().split(64)))
    change = model[0].weight.dequantize().double() - weight.double()
    theirs = sign_round_of_the_paper(weight.double(), x, bits, 32)
    assert float((x @ change.t()).square().sum()) <= 1.02 * theirs
