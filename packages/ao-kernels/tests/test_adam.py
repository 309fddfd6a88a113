"""The kernel of `adam_step`: against float64, the codes of `quantize`, bad input, threads, rounding."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Call, QTensor, Spec, codebook_dtype, quantize_tensor, register, reopen
from ao_core.dispatch import candidates, select
from ao_core.errors import UnsupportedOp
from ao_core.numerics import companded_values, dynamic_values, relative_error
from ao_core.registry import registry
from ao_core.tensor.create import encode_reference
from ao_core.testing.base import same_bits
from ao_kernels.cpu.adam import adam_step

BOOKS = {
    "dynamic8": dynamic_values(8, signed=True),
    "dynamic8u": dynamic_values(8, signed=False),
    "companded8": companded_values(signed=True),
    "companded8u": companded_values(signed=False),
}
STATES = [
    ("dynamic8", "dynamic8u"),
    ("companded8", "companded8u"),
    ("f8e4m3", "f8e4m3"),
    ("int8", "uint8"),
]
SHAPES = [(1,), (255,), (256,), (257,), (0,), (4097,), (3, 0), (3, 5, 700)]
M32 = 0xFFFFFFFF
DTYPES = [torch.float32, torch.bfloat16]
OPTIONS: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "step": 1, "decoupled": True,
    "maximize": False, "seed": None,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def books() -> None:
    """The number formats of optimizers' states, where nobody has registered them."""
    for name, values in BOOKS.items():
        if name not in registry.dtypes:
            reopen()
            register(codebook_dtype(name, values))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", STATES, ids=lambda names: names[0])
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_have_the_bits_of_the_rule_and_of_quantize(
    names: tuple[str, str], dtype: torch.dtype, decoupled: bool
) -> None:
    of = problem(names, SHAPES, dtype)
    for step in range(1, 5):
        grads = gradients(of, step)
        given = {**OPTIONS, "step": step, "decoupled": decoupled, "maximize": step == 2}
        expected = [
            rule(p, g, m.dequantize(torch.float32), v.dequantize(torch.float32), **given)
            for p, g, m, v in zip(of.params, grads, of.exp_avgs, of.exp_avg_sqs, strict=True)
        ]
        of.step(grads, **given)
        for i, (p, *moments) in enumerate(expected):
            assert same_bits(of.params[i], p.to(dtype)), SHAPES[i]
            for moment, found in zip(moments, (of.exp_avgs[i], of.exp_avg_sqs[i]), strict=True):
                wanted = encode_reference(moment, found.spec)
                assert same_bits(found.scale, wanted["scale"]), SHAPES[i]
                assert same_bits(found.qdata, wanted["qdata"]), SHAPES[i]


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
    least = -dtype.reach if dtype.min < 0 else 0.0
    numbers = numbers[(numbers >= least) & (numbers <= dtype.reach)]
    assert numbers.numel() > 17_000
    # a number of the greatest size in every block makes the scale 1
    blocks = F.pad(numbers, (0, -len(numbers) % 255)).reshape(-1, 255)
    numbers = F.pad(blocks, (0, 1), value=dtype.reach).flatten()
    of = problem((name, "f8e4m3"), [tuple(numbers.shape)])
    of.step([numbers], betas=(0.0, 0.0))
    (moment,) = of.exp_avgs
    assert bool((moment.scale == 1).all())
    assert same_bits(moment.qdata, dtype.encode(numbers + 0.0))  # 0 * 0 + -0 is 0


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
    """Scales outside of the usual range give the codes of `quantize` too."""
    sizes = [0.0, 1e-37, 1e-22, 1e-18, 1e-10, 1e10, 1e18]
    of = problem(names, [(300,)] * len(sizes))
    grads = [randn(300) * size for size in sizes]
    given = {**OPTIONS, "eps": 1e-30}
    expected = [
        rule(p, g, torch.zeros(300), torch.zeros(300), **given)
        for p, g in zip(of.params, grads, strict=True)
    ]
    of.step(grads, **given)
    for i, (p, m, v) in enumerate(expected):
        assert same_bits(of.params[i], p), sizes[i]
        for moment, found in ((m, of.exp_avgs[i]), (v, of.exp_avg_sqs[i])):
            assert same_bits(found.qdata, encode_reference(moment, found.spec)["qdata"]), sizes[i]


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
        bits = expected.view(torch.int32) + torch.tensor(words, dtype=torch.int32)
        rounded = (bits & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
        assert same_bits(of.params[i], rounded)


def test_float32_parameters_ignore_the_seed() -> None:
    runs = [problem(STATES[0], [(300,)]) for _ in range(2)]
    for of, seed in zip(runs, (None, 7), strict=True):
        of.step([randn(300)], seed=seed)
    assert same_bits(runs[0].params[0], runs[1].params[0])


# -- threads, memory, refusals -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    before, found = torch.get_num_threads(), []
    shapes = [(70_001,), (5,), (0,), *[(300,)] * 20, (200, 513)]
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            of = problem(STATES[0], shapes, dtype)
            for step in (1, 2):
                of.step([randn(*shape, seed=step).to(dtype) for shape in shapes], step=step, seed=3)
            found.append(of.parts())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


def test_views_at_any_offset_and_nothing_beside_them() -> None:
    """Parameters and gradients that begin in the middle of other memory, which stays as it was."""
    of, plain = (problem(STATES[0], [(600,)]) for _ in range(2))
    memory, grad = torch.full((700,), 5.0), randn(600)
    memory[33:633] = of.params[0]
    shifted = F.pad(grad, (1, 0))[1:]
    Problem([memory[33:633]], of.exp_avgs, of.exp_avg_sqs).step([shifted])
    plain.step([grad])
    assert same_bits(memory[33:633], plain.params[0])
    assert bool((memory[:33] == 5).all() and (memory[633:] == 5).all())


def test_a_graph_that_has_saved_parameters_notices_the_step() -> None:
    of = problem(STATES[0], [(600,)])
    parameter = of.params[0].requires_grad_()
    loss = parameter.square().sum()
    with torch.no_grad():
        of.step([randn(600)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        of = problem(STATES[0], [(600,)])
        before = of.params[0].clone()
        of.step([randn(600)])
        assert not same_bits(before, of.params[0])


def test_no_tensors() -> None:
    Problem([], [], []).step([])


def call(spec: Spec, dtype: torch.dtype = torch.float32) -> Call:
    return Call("adam_step", spec, (700,), (700,), dtype, "cpu")


def test_who_serves() -> None:
    spec = Spec("dynamic8", (256,), layout="flat")
    assert select(call(spec)).name == "cpu_adam_step"
    (found,) = (c for c in candidates(call(spec)) if c.kernel.name == "cpu_adam_step")
    assert found.description.endswith("all parameters in one pass")
    for bad, text in (
        (call(spec, torch.float16), "not torch.float16"),
        (call(Spec("dynamic8", (128,), layout="flat")), "blocks of 256"),
        (call(Spec("dynamic8", (256,), "bfloat16", layout="flat")), "float32 scales"),
        (call(Spec("nf4", (256,), layout="flat")), "8 bits"),
    ):
        (found,) = (c for c in candidates(bad) if c.kernel.name == "cpu_adam_step")
        assert text in str(found.refusal)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda of: problem(STATES[0], [(30, 20)])._replace(params=[torch.zeros(30, 20).t()]),
            "params.0.: .*contiguous",
        ),
        (
            lambda of: of._replace(exp_avg_sqs=problem(("nf4", "nf4"), [(600,)]).exp_avgs),
            "exp_avg_sqs: .*8 bits",
        ),
        (lambda of: of._replace(exp_avg_sqs=[randn(600)]), "exp_avg_sqs: .*quantized"),
        (lambda of: of._replace(exp_avgs=[problem(STATES[0], [(30, 20)]).exp_avgs[0].t()]), "transposed"),
        (lambda of: of._replace(params=[torch.zeros(599)]), r"grads.0.: has shape"),
        (lambda of: of._replace(params=[torch.zeros(600).double()]), "params: has dtype Double"),
        (lambda of: of._replace(params=[torch.zeros(600).bfloat16()]), r"grads.0.: has dtype Float"),
        (lambda of: of._replace(exp_avgs=of.exp_avgs * 2), "m: has 2 tensors"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(change: Any, text: str) -> None:
    of = problem(STATES[0], [(600,)])
    of.step([randn(600)])
    wrong: Problem = change(of)
    before = [part.clone() for part in wrong.parts()]
    with pytest.raises((UnsupportedOp, RuntimeError), match=text):
        wrong.step([randn(600)], step=2)
    assert all(same_bits(a, b) for a, b in zip(before, wrong.parts(), strict=True))


def test_formats_that_are_too_fine() -> None:
    """Where more steps lie close together than cells can tell apart, the kernel says so."""
    if "too_fine" not in registry.dtypes:
        reopen()
        register(codebook_dtype("too_fine", [1 + i / 1e5 for i in range(256)]))
    (found,) = (
        c for c in candidates(call(Spec("too_fine", (256,), layout="flat")))
        if c.kernel.name == "cpu_adam_step"
    )  # fmt: skip
    assert "lie too near to each other" in str(found.refusal)
