"""The optimizer's kernel in Triton's interpreter, against float64, over tensors of all sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core import Spec, quantize_tensor
from ao_core.ext import UnsupportedOp, registry
from ao_core.testing.base import gaussian
from ao_kernels.triton.adam.op import adam_step

# Triton 3.6 with NumPy 2.2
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("optimizer_states"),
]

STATE = Spec("f8e4m3", (256,), layout="flat")
SQUARES = Spec("f8e5m3u", (256,), layout="flat")
COMPANDED = Spec("companded8", (256,), layout="flat"), Spec("companded8u", (256,), layout="flat")
STATES = (STATE, SQUARES), COMPANDED
#: within a block, a block, more than one turn of the loop with and without a rest, and nothing
SHAPES = ((3,), (256,), (5, 410), (1024,), (0,), (1,))
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "seed": None}


def problem(dtype=torch.float32, shapes=SHAPES, states=(STATE, SQUARES)):
    params = [gaussian(shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    first, second = (
        [
            quantize_tensor(gaussian(shape, seed=seed + i) ** power, spec)
            for i, shape in enumerate(shapes)
        ]
        for spec, seed, power in zip(states, (10, 20), (1, 2), strict=True)
    )
    grads = [gaussian(shape, seed=30 + i).to(dtype) for i, shape in enumerate(shapes)]
    return params, grads, first, second


def expected(param, grad, m, v, *, lr, betas, eps, weight_decay, seed, step, decoupled, maximize):
    """One step in float64: parameter and moments, not rounded."""
    p, g, m, v = (x.double() for x in (param, grad, m.dequantize(), v.dequantize()))
    g = -g if maximize else g
    g = g if decoupled else g + weight_decay * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    p = p * (1 - lr * weight_decay) if decoupled else p
    spread = v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
    return p - lr / (1 - betas[0] ** step) * m / spread, m, v


def allowed(exact, stored):
    """How far a moment may be from its exact value: half a step of its format there."""
    scale = stored.scale.repeat_interleave(256)[: exact.numel()].view(exact.shape).double()
    name, share = stored.spec.dtype, (exact / scale).abs()
    if name == "companded8":  # steps of (i / 127)²
        return scale * ((share.sqrt() + 0.5 / 127) ** 2 - share + 1e-6)
    if name == "companded8u":
        return scale * ((share**0.25 + 0.5 / 255) ** 4 - share + 1e-6)
    # three bits of mantissa, or what the smallest numbers are off by
    return exact.abs() / 16 * 1.0001 + scale * (2.0**-10 if name == "f8e4m3" else 2.0**-31)


@pytest.mark.parametrize("states", STATES, ids=["float8", "companded8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("decoupled", "maximize", "step"), [(True, False, 1), (False, True, 7), (True, True, 1000)]
)
def test_a_step(states, dtype, decoupled, maximize, step):
    params, grads, first, second = problem(dtype, states=states)
    options = {**OPTIONS, "decoupled": decoupled, "maximize": maximize, "step": step}
    wanted = [expected(*four, **options) for four in zip(params, grads, first, second, strict=True)]
    adam_step(params, grads, first, second, **options)
    unit = torch.finfo(dtype).eps
    for (p, m, v), param, moment, square in zip(wanted, params, first, second, strict=True):
        assert bool(((param.double() - p).abs() <= unit * p.abs() + 1e-6).all())
        for exact, stored in ((m, moment), (v, square)):
            error = (stored.dequantize().double() - exact).abs()
            assert bool((error <= allowed(exact, stored)).all())


@pytest.mark.parametrize(("states", "reaches"), [(STATES[0], (448, 1.875)), (STATES[1], (1, 1))])
def test_scales_are_those_of_the_largest_magnitude(states, reaches):
    params, grads, first, second = problem(shapes=((700,),), states=states)
    options = {**OPTIONS, "decoupled": True, "maximize": False, "step": 3}
    _, m, v = expected(params[0], grads[0], first[0], second[0], **options)
    adam_step(params, grads, first, second, **options)
    for exact, stored, reach in zip((m, v), (*first, *second), reaches, strict=True):
        blocks = torch.nn.functional.pad(exact, (0, 68)).view(3, 256)
        torch.testing.assert_close(
            stored.scale.double(), blocks.abs().amax(1) / reach, rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("states", STATES, ids=["float8", "companded8"])
def test_zeros_stay_and_nan_spreads_over_its_block(states):
    params, grads, first, second = problem(shapes=((700,),), states=states)
    zero_point = [quantize_tensor(torch.zeros(700), each) for each in states]
    grads[0].zero_()
    options = {**OPTIONS, "weight_decay": 0.0, "decoupled": True, "maximize": False, "step": 1}
    before = params[0].clone()
    adam_step(params, grads, zero_point[:1], zero_point[1:], **options)
    assert torch.equal(params[0], before)
    assert not zero_point[0].dequantize().any()
    grads[0][300] = torch.nan
    adam_step(params, grads, first, second, **options)
    assert params[0].isnan().nonzero().tolist() == [[300]]
    assert first[0].dequantize().isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_codes_are_those_of_the_reference():
    """Of new moments over 40 octaves, beside the middles between values too, and none becomes 0."""
    params, grads, first, second = problem(shapes=((40, 256),))
    second[0].qdata.zero_()
    second[0].scale.fill_(2.0**-126)
    values = registry.dtypes.get("f8e5m3u").decode(torch.arange(256, dtype=torch.uint8))
    squares = torch.rand(40, 256, generator=torch.Generator().manual_seed(0)).mul(-40).exp2()
    squares[:, :255] *= (values[1:] + values[:-1]) / 2 * 1.0001
    squares[:, 255] = 1.875  # so that scales are 1
    grads = [squares.sqrt()]
    options = {**OPTIONS, "betas": (0.9, 0.0), "decoupled": True, "maximize": False, "step": 1}
    adam_step(params, grads, first, second, **options)
    torch.testing.assert_close(second[0].scale, torch.ones(40), rtol=1e-6, atol=0)
    wanted = quantize_tensor(grads[0].square(), SQUARES)
    assert torch.equal(second[0].qdata, wanted.qdata)
    assert bool((second[0].dequantize() > 0).all())


def test_companded_codes_are_those_of_the_reference():
    """Of all values, and next to the midpoints between them; scales of zeros are those of the reference."""
    for spec, place in zip(COMPANDED, (2, 3), strict=True):
        values = registry.dtypes.get(spec.dtype).decode(torch.arange(255, dtype=torch.uint8))
        middles = (values[1:] + values[:-1]) / 2
        rows = (values, middles * 1.0001, middles * 0.9999, torch.zeros(1))
        wanted = torch.stack([F.pad(row, (0, 256 - len(row))) for row in rows])
        wanted[:3, 255] = 1.0
        moments = problem(shapes=((4, 256),), states=COMPANDED)
        grads = wanted.sqrt() if place == 3 else wanted
        options = {**OPTIONS, "betas": (0.0, 0.0), "decoupled": True, "maximize": False, "step": 1}
        adam_step(moments[0], [grads], *moments[2:], **options)
        found = moments[place][0]
        exact = quantize_tensor(grads.square() if place == 3 else grads, spec)
        assert torch.equal(found.qdata, exact.qdata)
        torch.testing.assert_close(found.scale, exact.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("states", STATES, ids=["float8", "companded8"])
def test_squares_that_are_hardly_numbers(states):
    """The scale of a block of tiny squares has no reciprocal in float32."""
    params, grads, first, second = problem(shapes=((256,),), states=states)
    second = [quantize_tensor(torch.zeros(256), states[1])]
    grads[0] *= 1e-19
    options = {**OPTIONS, "decoupled": True, "maximize": False, "step": 1}
    adam_step(params, grads, first, second, **options)
    assert bool(params[0].isfinite().all())
    assert bool(second[0].dequantize().isfinite().all())


@pytest.mark.parametrize("states", STATES, ids=["float8", "companded8"])
def test_stochastic_rounding(states):
    """Either neighbour, on average the number itself, and the same again with the same seed."""
    results = []
    for seed in (5, 5, 6):
        params, grads, first, second = problem(torch.bfloat16, ((40, 50),), states)
        options = {**OPTIONS, "decoupled": True, "maximize": False, "step": 2, "seed": seed}
        exact, _, _ = expected(params[0], grads[0], first[0], second[0], **options)
        adam_step(params, grads, first, second, **options)
        results.append(params[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    error = (results[0].double() - exact) / (exact.abs() * 2**-7)
    assert bool((error.abs() <= 1.0001).all())
    assert bool((error.abs() > 0.51).any())  # not to the nearest
    assert abs(error.mean()) < 0.03


def test_other_moments_and_strided_tensors_are_refused():
    params, grads, first, second = problem(shapes=((16, 16),))
    options = {**OPTIONS, "decoupled": True, "maximize": False, "step": 1}
    other = [quantize_tensor(torch.zeros(16, 16), Spec("int8", (256,), layout="flat"))]
    with pytest.raises(UnsupportedOp, match=r"exp_avg_sqs\[0\].*found int8"):
        adam_step(params, grads, first, other, **options)
    with pytest.raises(UnsupportedOp, match=r"grads\[0\].*contiguous"):
        adam_step(params, [grads[0].t()], first, second, **options)
