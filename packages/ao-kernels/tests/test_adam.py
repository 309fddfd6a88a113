"""The kernel of `adam_step`: against float64, the codes of `quantize`, odd gradients, rounding, threads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import DType, QTensor, Spec, quantize_tensor
from ao_core.ext import registry
from ao_core.ext.numerics import quant_max_of, relative_error
from ao_core.testing.base import same_bits
from ao_kernels.cpu.optim import adam_step

pytestmark = pytest.mark.usefixtures("optimizer_states")

STATES = [
    ("dynamic8", "dynamic8u"),
    ("companded8", "companded8u"),
    ("f8e4m3", "f8e5m3u"),
    ("int8", "uint8"),
]
#: how near to the middle between two values, over its size, a number may get the farther one's code
NEAR = {"companded8": 2.0**-13, "companded8u": 6 * 2.0**-14}
SHAPES = [(1,), (255,), (256,), (257,), (0,), (4097,), (3, 0), (3, 5, 700)]
M32 = 0xFFFFFFFF
DTYPES = [torch.float32, torch.bfloat16]
OPTIONS: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "step": 1, "decoupled": True,
    "maximize": False, "seed": None,
}  # fmt: skip


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Problem(NamedTuple):
    params: list[Tensor]
    exp_avgs: list[QTensor]
    exp_avg_sqs: list[QTensor]

    def step(self, grads: list[Tensor], **options: Any) -> None:
        adam_step(self.params, grads, self.exp_avgs, self.exp_avg_sqs, **{**OPTIONS, **options})

    def parts(self) -> list[Tensor]:
        """Everything that a step changes."""
        moments = [q for q in (*self.exp_avgs, *self.exp_avg_sqs) if isinstance(q, QTensor)]
        return [*self.params, *(part for q in moments for part in (q.qdata, q.scale))]


def problem(
    names: tuple[str, str], shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Problem:
    params = [randn(*shape).to(dtype) for shape in shapes]
    specs = [Spec(name, (256,), layout="flat") for name in names]
    moments = [[quantize_tensor(torch.zeros(shape), spec) for shape in shapes] for spec in specs]
    return Problem(params, *moments)


def gradients(of: Problem, seed: int) -> list[Tensor]:
    """Of sizes that differ between elements, tensors and steps by orders of magnitude."""
    return [
        (
            randn(*p.shape, seed=seed)
            * randn(*p.shape, seed=seed + 50).mul(2).exp()
            * 10.0 ** (i - seed)
        ).to(p.dtype)
        for i, p in enumerate(of.params)
    ]


def rule(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, step: int, decoupled: bool, maximize: bool, seed: None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The documented rule, each operation in the dtype of the moments."""
    (beta1, beta2), constant = betas, lambda value: torch.tensor(value, dtype=m.dtype)
    p, g = p.to(m.dtype), g.to(m.dtype)
    g = -g if maximize else g
    if not decoupled and weight_decay:
        g = g + constant(weight_decay) * p
    m = constant(beta1) * m + constant(1 - beta1) * g
    v = constant(beta2) * v + constant(1 - beta2) * g * g
    # roots in float64, because those of torch in float32 are not always the nearest ones
    root = v.double().sqrt().to(m.dtype) * constant(1 / math.sqrt(1 - beta2**step))
    change = constant(lr / (1 - beta1**step)) * (m / (root + constant(eps)))
    return constant(1 - lr * weight_decay if decoupled else 1.0) * p - change, m, v


def excess(codes: Tensor, numbers: Tensor, dtype: DType) -> Tensor:
    """How much farther away than the nearest value that of the code is, over the number's size."""
    values = dtype.decode(torch.arange(256, dtype=torch.uint8)).double()
    values = values[values.isfinite()].unique()
    numbers = numbers.double().contiguous()
    nearest = values[torch.bucketize(numbers, (values[1:] + values[:-1]) / 2)]
    found = dtype.decode(codes).double()
    return ((found - numbers).abs() - (nearest - numbers).abs()) / numbers.abs().clamp_min(1e-300)


def check(of: Problem, grads: list[Tensor], before: list[tuple[Tensor, ...]], options: Any) -> None:
    """That a step is as exact as documented; `before`: parameters and moments, in the rule's dtype."""
    (beta1, beta2), step = options["betas"], options["step"]
    rate, unbias = options["lr"] / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    l2 = 0.0 if options["decoupled"] else options["weight_decay"]
    for i, ((p, m, v), grad) in enumerate(zip(before, grads, strict=True)):
        new_p, new_m, new_v = rule(p, grad, m, v, **options)
        # the sizes of what is summed; below 2^-126 float32 has steps of 2^-149
        g = grad.to(p.dtype).abs() + l2 * p.abs()
        m_size = beta1 * m.abs() + (1 - beta1) * g
        v_size = beta2 * v + (1 - beta2) * g * g + 2.0**-127
        change = rate * m_size / (new_v.sqrt() * unbias + options["eps"])
        change = change * torch.where(new_v == 0, 1, v_size / new_v)
        found = of.params[i]
        bound = 2.0**-20 * (p.abs() + change)
        if found.dtype == torch.bfloat16:
            bound = bound + 2.0**-7.99 * new_p.abs()
        assert bool(((found.to(p.dtype) - new_p).abs() <= bound).all()), p.shape
        if p.numel():
            check_moment(of.exp_avgs[i], new_m, 2.0**-21 * m_size)
            check_moment(of.exp_avg_sqs[i], new_v, 2.0**-21 * v_size)


def check_moment(found: QTensor, moment: Tensor, error: Tensor) -> None:
    """That scales and codes are those of moments at most `error` beside `moment`."""
    dtype = registry.dtypes.get(found.spec.dtype)
    moment, error = (x.flatten().double() for x in (moment, error))
    greatest, most = (
        F.pad(x.abs(), (0, -len(x) % 256)).reshape(-1, 256).amax(1) for x in (moment, error)
    )
    scale = found.scale.double().flatten()
    reach = quant_max_of(dtype, (256,))
    wanted = torch.where(greatest < 2.0**-126 * reach, scale, greatest / reach)
    assert bool(((scale - wanted).abs() * reach <= most).all()), moment.shape
    by = scale.repeat_interleave(256)[: len(moment)]
    numbers = moment / by
    farther = excess(found.qdata.flatten(), numbers, dtype) * numbers.abs()
    near = NEAR.get(dtype.name, 2.0**-22) * numbers.abs()
    assert bool((farther <= 2 * (near + error / by)).all()), (moment.shape, dtype.name)


def state_of(of: Problem, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Copies of parameters and moments."""
    return [
        (p.to(dtype, copy=True), *(x.dequantize(torch.float32).to(dtype) for x in moments))
        for p, *moments in zip(*of, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", STATES, ids=lambda names: names[0])
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_follow_the_rule_and_the_codes_of_quantize(
    names: tuple[str, str], dtype: torch.dtype, decoupled: bool
) -> None:
    of = problem(names, SHAPES, dtype)
    for step in range(1, 5):
        grads = gradients(of, step)
        given = {**OPTIONS, "step": step, "decoupled": decoupled, "maximize": step == 2}
        before = state_of(of, torch.float64)
        of.step(grads, **given)
        check(of, grads, before, given)


@pytest.mark.parametrize("names", STATES[:3], ids=lambda names: names[0])
def test_error_against_float64(names: tuple[str, str]) -> None:
    """Twenty steps with moments of 8 bits move parameters almost as those of float64 do."""
    of = problem(names, [(4097,)])
    start = of.params[0].double()
    p, m, v = start.clone(), torch.zeros(4097).double(), torch.zeros(4097).double()
    for step in range(1, 21):
        grad = randn(4097, seed=step) + randn(4097)
        of.step([grad], step=step)
        p, m, v = rule(p, grad, m, v, **{**OPTIONS, "step": step})
    assert 1e-4 < relative_error(p - start, of.params[0].double() - start) < 0.03


@pytest.mark.parametrize("name", sorted({name for names in STATES for name in names}))
def test_codes_of_all_numbers(name: str) -> None:
    """Every bfloat16 and the numbers beside every middle between values: the codes of the format."""
    dtype = registry.dtypes.get(name)
    values = dtype.decode(torch.arange(256, dtype=torch.uint8)).unique()
    values = values[values.isfinite()]
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ways = (torch.tensor(-1e9), torch.tensor(1e9))
    near = [torch.nextafter(x, way) for x in (middles, values) for way in ways]
    numbers = torch.cat([patterns, middles, values, *near])
    reach = quant_max_of(dtype, (256,))
    numbers = numbers[(numbers >= (-reach if dtype.min < 0 else 0.0)) & (numbers <= reach)]
    assert numbers.numel() > 17_000
    # a number of the greatest size in every block makes the scale 1
    blocks = F.pad(numbers, (0, -len(numbers) % 255)).reshape(-1, 255)
    numbers = F.pad(blocks, (0, 1), value=reach).flatten()
    of = problem((name, "f8e4m3"), [tuple(numbers.shape)])
    of.step([numbers], betas=(0.0, 0.0))
    (moment,) = of.exp_avgs
    assert bool((moment.scale == 1).all())
    expected = dtype.encode(numbers + 0.0)  # 0 * 0 + -0 is 0
    if name in NEAR:
        assert float(excess(moment.qdata, numbers, dtype).max()) <= 2 * NEAR[name]
        # beside the middles every second one may be another, elsewhere few
        assert float((moment.qdata != expected)[:16_000].double().mean()) < 0.004
    else:
        assert same_bits(moment.qdata, expected)


@pytest.mark.parametrize("name", sorted(NEAR))
def test_few_codes_are_not_the_nearest(name: str) -> None:
    dtype = registry.dtypes.get(name)
    numbers = randn(100_000)
    of = problem((name, "f8e4m3"), [(100_000,)])
    of.step([numbers.abs() if dtype.min == 0 else numbers], betas=(0.0, 0.0))
    (moment,) = of.exp_avgs
    blocks = F.pad(numbers, (0, -len(numbers) % 256)).reshape(-1, 256)
    expected = dtype.encode((blocks.abs() if dtype.min == 0 else blocks) / moment.scale[:, None])
    assert float((moment.qdata != expected.flatten()[:100_000]).double().mean()) < 0.004


# -- values that are no usual ones -------------------------------------------------------------------


@pytest.mark.parametrize("names", STATES[:3], ids=lambda names: names[0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite(names: tuple[str, str], bad: float) -> None:
    """The parameter becomes NaN, the others move on; a NaN takes its block of moments with it."""
    of, clean = (problem(names, [(700,)]) for _ in range(2))
    grad = randn(700)
    clean.step([grad])
    grad[300] = bad
    of.step([grad])
    others = torch.arange(700) != 300
    assert math.isnan(of.params[0][300])
    assert same_bits(of.params[0][others], clean.params[0][others])
    blocks = torch.tensor([0, 2])
    for moment, without in zip(
        (*of.exp_avgs, *of.exp_avg_sqs), (*clean.exp_avgs, *clean.exp_avg_sqs), strict=True
    ):
        assert same_bits(moment.scale[blocks], without.scale[blocks])
        values = moment.dequantize()
        assert same_bits(values[:256], without.dequantize()[:256])
        assert bool(values[256:512].isnan().all()) == math.isnan(bad)
        assert math.isnan(bad) or abs(values[300]) > 1e38


@pytest.mark.parametrize("names", STATES[:3], ids=lambda names: names[0])
def test_zeros_and_tiny_and_huge_gradients(names: tuple[str, str]) -> None:
    """Scales outside of the usual range are as exact."""
    sizes = [0.0, 1e-37, 1e-22, 1e-18, 1e-10, 1e10, 1e18]
    of = problem(names, [(300,)] * len(sizes))
    grads = [randn(300) * size for size in sizes]
    for step in (1, 2):
        given = {**OPTIONS, "eps": 1e-30, "step": step}
        before = state_of(of, torch.float32)  # in which squares become 0 and infinite
        of.step(grads, **given)
        check(of, grads, before, given)


def test_denominators_that_are_zero_or_infinite() -> None:
    """As a division has it: 0 / 0 is NaN, and what is divided by infinity does not move."""
    of = problem(STATES[1], [(300,)])
    grad = F.pad(torch.tensor([1e25, -1e25, 1.0]), (0, 297))
    wanted = rule(
        of.params[0], grad, torch.zeros(300), torch.zeros(300), **{**OPTIONS, "eps": 0.0}
    )[0]
    of.step([grad], eps=0.0)
    assert bool(wanted[:3].isfinite().all() and wanted[3:].isnan().all())
    assert torch.allclose(of.params[0], wanted, rtol=2.0**-20, atol=0, equal_nan=True)


# -- stochastic rounding -----------------------------------------------------------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as its paper has it."""
    (a, b, c, d), (k, n) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k, second & M32, (first >> 32) ^ d ^ n, first & M32
        k, n = (k + 0x9E3779B9) & M32, (n + 0xBB67AE85) & M32
    return a, b, c, d


def test_philox_itself() -> None:
    """The known answers that the authors publish."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (M32,) * 4
    assert philox(ones, (M32, M32)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40 + 3, 2**63 - 1])
def test_bfloat16_parameters_are_rounded_by_philox(seed: int) -> None:
    of = problem(STATES[0], [(300,), (0,), (261,)], torch.bfloat16)
    grads = gradients(of, 1)
    exact = [
        rule(p, g, torch.zeros(p.shape), torch.zeros(p.shape), **OPTIONS)[0]
        for p, g in zip(of.params, grads, strict=True)
    ]
    of.step(grads, seed=seed)
    key = (seed & M32, seed >> 32 & M32)
    for i, expected in enumerate(exact):
        words = [philox((k // 4, 0, i, 0), key)[k % 4] >> 16 for k in range(len(expected))]
        low, high = (
            (((expected * (1 + off)).view(torch.int32) + torch.tensor(words, dtype=torch.int32)) & -65536)
            .view(torch.float32).to(torch.bfloat16)
            for off in (-1e-6, 1e-6)
        )  # fmt: skip
        assert bool(((of.params[i] == low) | (of.params[i] == high)).all())
        assert float((low != high).double().sum()) <= 3


def test_float32_parameters_ignore_the_seed() -> None:
    runs = [problem(STATES[0], [(300,)]) for _ in range(2)]
    for of, seed in zip(runs, (None, 7), strict=True):
        of.step([randn(300)], seed=seed)
    assert same_bits(runs[0].params[0], runs[1].params[0])


# -- threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", STATES[:3], ids=lambda names: names[0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_number_of_threads(names: tuple[str, str], dtype: torch.dtype) -> None:
    before, found = torch.get_num_threads(), []
    shapes = [(70_001,), (5,), (0,), *[(300,)] * 20, (200, 513)]
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            of = problem(names, shapes, dtype)
            for step in (1, 2):
                of.step([randn(*shape, seed=step).to(dtype) for shape in shapes], step=step, seed=3)
            found.append(of.parts())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))
