"""Scales and zero points: bounds on the error, exact zeros, ragged blocks, extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.dtypes import CODED_DTYPES, int_dtype, lut_dtype
from ao_core.errors import ConfigError
from ao_core.numerics import (
    choose_qparams,
    dequantize_affine,
    expand,
    grid_shape,
    qparams_of_range,
    quant_max_of,
    quantize_affine,
    scale_to_float,
    sqnr,
)
from ao_core.records import DType
from ao_core.spec import SCALE_DTYPES, WHOLE

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}
INTS = {name: dtype for name, dtype in DTYPES.items() if dtype.kind == "int"}
STORAGE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
every_dtype = pytest.mark.parametrize("dtype", CODED_DTYPES, ids=lambda dtype: dtype.name)
every_int = pytest.mark.parametrize("dtype", INTS.values(), ids=INTS)
every_scale = pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
blocks = st.lists(st.sampled_from([WHOLE, 1, 2, 4, 5]), min_size=1, max_size=3).map(tuple)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor, dtype: DType, block, zero_point="none", scale_dtype="float32"):
    """(approximation, codes, scale, zero point), with every invariant of the parts checked."""
    scale, point = choose_qparams(x, dtype, block, zero_point, scale_dtype)
    assert scale.shape == grid_shape(x.shape, block)
    assert scale.dtype == STORAGE[scale_dtype]
    if zero_point == "none":
        assert point is None
    else:
        assert point is not None
        assert point.shape == scale.shape
    codes = quantize_affine(x, dtype, block, scale, point)
    assert codes.dtype == torch.uint8
    assert codes.shape == x.shape
    assert codes.numel() == 0 or int(codes.max()) < 1 << dtype.bits
    approx = dequantize_affine(codes, dtype, block, scale, point)
    assert approx.dtype == torch.float32
    assert approx.shape == x.shape
    return approx, codes, scale, point


@every_dtype
@given(shapes, blocks, st.integers(0, 100))
def test_dequantize_is_the_formula(dtype: DType, shape, block, seed):
    """(decode - zero) * scale, element by element, whatever the shape and block."""
    x = gaussian(*shape, seed=seed) if shape else gaussian(1, seed=seed).squeeze()
    for zero_point in ("none", "int", "float") if dtype.kind == "int" else ("none", "float"):
        approx, codes, scale, point = round_trip(x, dtype, block, zero_point)
        wide = expand(scale, shape, block)
        offset = 0.0
        if point is not None:
            offset = expand(dtype.decode(point) if zero_point == "int" else point, shape, block)
        assert torch.equal(approx, (dtype.decode(codes) - offset) * wide)
        assert torch.equal(codes, dtype.encode((x / wide + offset).expand(shape)))


@every_scale
@every_int
def test_error_is_at_most_half_a_step_where_nothing_clips(dtype: DType, scale_dtype: str):
    x = gaussian(16, 100)
    zeros = ("none", "int", "float") if dtype.min < 0 else ("int", "float")
    for zero_point in zeros:
        approx, _, scale, point = round_trip(x, dtype, (1, 32), zero_point, scale_dtype)
        step = expand(scale_to_float(scale), x.shape, (1, 32))
        shift = 0.0
        if point is not None:
            values = dtype.decode(point) if zero_point == "int" else point.float()
            shift = expand(values, x.shape, (1, 32))
        position = x / step + shift
        inside = (position > dtype.min - 0.5) & (position < dtype.max + 0.5)
        assert (approx - x).abs()[inside].le(0.5001 * step[inside]).all()
        assert inside.float().mean() > 0.3
        # A scale of full precision clips at most half a step, with or without a zero point.
        if scale_dtype == "float32" and dtype.bits > 1:
            assert (approx - x).abs().le(1.001 * step).all()
            assert zero_point == "none" or inside.float().mean() > 0.9


@every_int
def test_symmetric_scale_moves_no_element_by_more_than_half_a_step(dtype: DType):
    if dtype.min >= 0 or dtype.name == "int1":
        x = gaussian(8, 64).abs() * (1 if dtype.min >= 0 else -1)
    else:
        x = gaussian(8, 64)
    approx, _, scale, _ = round_trip(x, dtype, (1, WHOLE))
    assert (approx - x).abs().le(0.50001 * scale).all()
    assert torch.equal(scale, x.abs().amax(1, keepdim=True) / dtype.quant_max)


@every_scale
@every_int
def test_zero_is_exact(dtype: DType, scale_dtype: str):
    x = gaussian(12, 65)
    x[::2] += 3.0
    x[1::4] -= 9.0
    x[:, ::7] = 0.0
    for zero_point in ("none", "int"):
        approx, *_ = round_trip(x, dtype, (1, 16), zero_point, scale_dtype)
        assert (approx[:, ::7] == 0).all()


@pytest.mark.parametrize("offset", [10.0, -10.0])
@every_int
def test_the_range_holds_zero_whatever_the_data(dtype: DType, offset: float):
    x = gaussian(4, 32).clamp(-3, 3) + offset
    scale, point = choose_qparams(x, dtype, (1, 16), "int")
    zeros = quantize_affine(torch.zeros_like(x), dtype, (1, 16), scale, point)
    assert (dequantize_affine(zeros, dtype, (1, 16), scale, point) == 0).all()
    approx = dequantize_affine(
        quantize_affine(x, dtype, (1, 16), scale, point), dtype, (1, 16), scale, point
    )
    assert (approx - x).abs().le(0.5001 * expand(scale, x.shape, (1, 16))).all()


def test_known_values():
    x = torch.tensor([[-1.0, 0.0, 2.0, 0.4]])
    approx, codes, scale, point = round_trip(x, DTYPES["uint2"], (1, 4), "int")
    assert scale.tolist() == [[1.0]]
    assert point.tolist() == [[1]]
    assert codes.tolist() == [[0, 1, 3, 1]]
    assert approx.tolist() == [[-1.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize("dtype", [DTYPES["int4"], DTYPES["int8"]], ids=["int4", "int8"])
def test_a_signed_zero_point_is_a_code(dtype: DType):
    x = gaussian(4, 64).abs()  # one-sided, so that the zero point is the least value
    approx, _, _, point = round_trip(x, dtype, (1, WHOLE), "int")
    assert point.dtype == torch.uint8
    assert (dtype.decode(point) == dtype.min).all()
    assert sqnr(x, approx) > sqnr(x, round_trip(x, dtype, (1, WHOLE))[0]) + 3


@every_dtype
@every_scale
@pytest.mark.parametrize("zero_point", ["none", "int", "float"])
def test_extreme_magnitudes_stay_finite(dtype: DType, scale_dtype: str, zero_point: str):
    if zero_point == "int" and dtype.kind != "int":
        zero_point = "none"
    for magnitude in (3.4e38, 1e38, 1e5, 1e-6, 1e-30, 1e-38, 1e-40, 1e-45, 0.0):
        x = torch.tensor([[1.0, -1.0, 0.5, 0.0]]) * magnitude
        approx, _, scale, point = round_trip(x, dtype, (1, WHOLE), zero_point, scale_dtype)
        step = scale_to_float(scale)
        assert step.isfinite().all()
        assert (step > 0).all()
        assert point is None or point.float().isfinite().all()
        # Rounding to the nearest value leaves the range by little; only float32 itself may end.
        assert approx.abs().max() <= 1.25 * x.abs().max() + step
        if magnitude <= 1e38:
            assert approx.isfinite().all()
        if magnitude == 0:
            assert step.item() == 1
            assert (approx == 0).all()


@pytest.mark.parametrize(
    ("scale_dtype", "least", "greatest"),
    [
        ("float16", 2.0**-24, 65504.0),
        ("bfloat16", 2.0**-126, torch.finfo(torch.bfloat16).max),
        ("e4m3", 2.0**-9, 448.0),
        ("e8m0", 2.0**-127, 2.0**127),
    ],
)
def test_scales_clamp_to_their_storage(scale_dtype: str, least: float, greatest: float):
    tiny, _ = choose_qparams(torch.tensor([1e-45]), DTYPES["int8"], (1,), "none", scale_dtype)
    huge, _ = choose_qparams(torch.tensor([3.4e38]), DTYPES["ternary"], (1,), "none", scale_dtype)
    assert tiny.float().item() == least
    assert huge.float().item() == greatest


@every_dtype
def test_nan_shows_in_its_block_alone(dtype: DType):
    x = gaussian(2, 8)
    x[0, 5] = math.nan
    for scale_dtype in SCALE_DTYPES:
        approx, *_ = round_trip(x, dtype, (1, 4), "none", scale_dtype)
        assert approx.isnan().tolist() == [[False] * 4 + [True] * 4, [False] * 8]


def test_codes_are_computed_against_the_stored_scale():
    """With an ideal scale of 1.9 rounded to an e8m0 of 2, 1.9 must be code 1, 3.7 code 2."""
    dtype = DTYPES["uint8"]
    scale = torch.tensor([2.0]).to(torch.float8_e8m0fnu)
    codes = quantize_affine(torch.tensor([1.9, 3.7, 5.2]), dtype, (WHOLE,), scale)
    assert codes.tolist() == [1, 2, 3]


@every_scale
def test_float_zero_points_have_a_float_dtype(scale_dtype: str):
    _, point = choose_qparams(gaussian(4, 8), DTYPES["uint4"], (1, 8), "float", scale_dtype)
    small = STORAGE[scale_dtype].itemsize == 1
    assert point.dtype == (torch.float32 if small else STORAGE[scale_dtype])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_output_is_rounded_once(out_dtype: torch.dtype):
    x = gaussian(8, 64)
    dtype = DTYPES["int8"]
    scale, _ = choose_qparams(x, dtype, (1, 32))
    codes = quantize_affine(x, dtype, (1, 32), scale)
    exact = dequantize_affine(codes, dtype, (1, 32), scale)
    got = dequantize_affine(codes, dtype, (1, 32), scale, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert torch.equal(got, exact.to(out_dtype))


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_input_dtypes_compute_in_float32(x_dtype: torch.dtype):
    x = gaussian(8, 64).to(x_dtype)
    for got, expected in zip(
        round_trip(x, DTYPES["uint4"], (1, 32), "int"),
        round_trip(x.float(), DTYPES["uint4"], (1, 32), "int"),
        strict=True,
    ):
        assert torch.equal(got, expected)


@every_dtype
def test_nothing_is_changed_in_place_and_strides_do_not_matter(dtype: DType):
    x = gaussian(64, 32).t().requires_grad_()
    scale, point = choose_qparams(x, dtype, (1, 16), "float")
    codes = quantize_affine(x, dtype, (1, 16), scale, point)
    parts = [x.detach().clone(), scale.clone(), point.clone(), codes.clone()]
    approx = dequantize_affine(codes, dtype, (1, 16), scale, point)
    for before, after in zip(parts, [x, scale, point, codes], strict=True):
        assert torch.equal(before, after)
    assert not any(part.requires_grad for part in (scale, point, codes))
    dense = x.detach().contiguous()
    again = quantize_affine(dense, dtype, (1, 16), *choose_qparams(dense, dtype, (1, 16), "float"))
    assert torch.equal(codes, again)
    assert torch.equal(approx, dequantize_affine(again, dtype, (1, 16), scale, point))


def test_dequantize_is_differentiable_in_scale_and_zero():
    dtype = DTYPES["uint4"]
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2.0]], requires_grad=True)
    zero_point = torch.tensor([[1.0, 0.0]], requires_grad=True)
    dequantize_affine(codes, dtype, (1, 2), scale, zero_point).sum().backward()
    assert scale.grad.tolist() == [[1.0, 7.0]]
    assert zero_point.grad.tolist() == [[-1.0, -4.0]]


@pytest.mark.parametrize("zero_point", ["none", "int"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_sqnr_of_integers_on_gaussian_data(bits: int, zero_point: str):
    """Uniform noise has the variance step**2 / 12. Few, coarse steps deviate from uniform a little.

    The greatest magnitude of a symmetric block errs by exactly half a step, step**2 / 4, or not at all.
    """
    x = gaussian(256, 512)
    approx, _, scale, _ = round_trip(x, DTYPES[f"int{bits}"], (1, 32), zero_point)
    of_greatest = 3 if bits < 5 else 0
    variance = scale.square().mean() / 12 * (1 if zero_point == "int" else (31 + of_greatest) / 32)
    expected = -10 * torch.log10(variance).item()
    assert sqnr(x, approx).item() == pytest.approx(expected, abs=1.0 if bits < 4 else 0.2)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("int2", 6.0, 7.0), ("int3", 13.3, 14.4), ("int4", 20.0, 21.0), ("int8", 44.6, 45.6),
        ("ternary", 3.5, 4.5), ("f8e4m3", 31.8, 32.8), ("f8e5m2", 25.9, 26.9),
        ("f6e3m2", 25.9, 26.9), ("f6e2m3", 31.4, 32.4), ("f4e2m1", 19.5, 20.5), ("nf4", 20.9, 21.9),
    ],
)  # fmt: skip
def test_sqnr_on_gaussian_data(name: str, low: float, high: float):
    """Both bounds: a 4-bit format that reports 60 dB is not quantizing."""
    x = gaussian(256, 512)
    approx, *_ = round_trip(x, DTYPES[name], (1, 32))
    assert low <= sqnr(x, approx).item() <= high


def test_bad_parameters_are_named():
    x = gaussian(4, 8)
    with pytest.raises(ConfigError, match="zero_point='asym'.*none, int, float"):
        choose_qparams(x, DTYPES["int8"], (1, 8), "asym")
    with pytest.raises(ConfigError, match="zero_point='int' needs an integer format, but nf4"):
        choose_qparams(x, DTYPES["nf4"], (1, 8), "int")
    with pytest.raises(ConfigError, match="scale_dtype='fp8'.*e8m0, e4m3"):
        choose_qparams(x, DTYPES["int8"], (1, 8), scale_dtype="fp8")
    with pytest.raises(ConfigError, match=r"must have shape \(4, 2\)"):
        quantize_affine(x, DTYPES["int8"], (1, 4), torch.ones(4, 1))


#: the least scale of each type
_LEAST = {
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-24,
    "e4m3": 2.0**-9,
    "e8m0": 2.0**-127,
}


def test_blocks_of_zeros_without_a_zero():
    """Codes that cannot say 0 get the least scale, not 1: else zeros would become the least value."""
    fmt = lut_dtype("positive", (0.25, 0.5, 1.0))
    x = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    scale, _ = choose_qparams(x, fmt, (1, 2))
    assert scale.flatten().tolist() == [2.0**-126, 2.0]
    signed = lut_dtype("signed", (-1.0, 0.0, 1.0))
    assert choose_qparams(x, signed, (1, 2))[0].flatten().tolist() == [1.0, 2.0]
    around = lut_dtype("around", (-2.0, 1.0, 2.0))  # as iq4_nl: of both signs, and no 0
    for scale_dtype, least in _LEAST.items():
        scale, _ = choose_qparams(x, around, (1, 2), scale_dtype=scale_dtype)
        assert scale_to_float(scale)[0].item() == least
    approx, *_ = round_trip(x, around, (1, 2), "float")
    assert approx[0].tolist() == [0.0, 0.0]  # a zero point is a value of the format


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_rank1_scales(scale_dtype):
    """Of each element the lesser of the greatest of its row and of its column, over `quant_max`."""
    fmt = int_dtype("int8", 8)
    x = torch.tensor([[1.0, -8.0, 0.0], [4.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    scale, zero_point = choose_qparams(x, fmt, (1, 1), scale_dtype=scale_dtype, rule="rank1")
    assert zero_point is None
    expected = torch.tensor([[4.0, 8.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 0.0]]) / fmt.quant_max
    torch.testing.assert_close(scale.float(), expected, rtol=2.0**-8, atol=2.0**-126)
    assert bool((scale > 0).all())
    # the greatest of each row and column of scales give all of them again
    rows, columns = scale.amax(1, keepdim=True), scale.amax(0, keepdim=True)
    assert torch.equal(torch.minimum(rows, columns), scale)


@pytest.mark.parametrize(("shape", "block"), [((4, 6), (1, 2)), ((4,), (1,)), ((2, 3, 4), (1, 1))])
def test_rank1_needs_a_matrix_and_a_scale_each(shape, block):
    with pytest.raises(ConfigError, match=r"use block=\(1, 1\) and two dimensions"):
        choose_qparams(torch.ones(shape), int_dtype("int8", 8), block, rule="rank1")


@pytest.mark.parametrize("bits", range(4, 9))
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256, 512])
def test_greatest_integer_or_half_a_step_beyond(bits: int, size: int):
    """Whichever has the less error: that of all elements of a small block, or of the greatest one."""
    x, dtype = gaussian(1 << 20).view(-1, size), DTYPES[f"int{bits}"]
    errors = []
    for quant_max in (dtype.max, dtype.quant_max):
        scale, _ = qparams_of_range(
            -x.abs().amax(1, keepdim=True),
            x.abs().amax(1, keepdim=True),
            dtype,
            quant_max=quant_max,
        )
        codes = quantize_affine(x, dtype, (1, size), scale)
        errors.append(sqnr(x, dequantize_affine(codes, dtype, (1, size), scale)).item())
    chosen = quant_max_of(dtype, (1, size))
    assert errors[(dtype.max, dtype.quant_max).index(chosen)] >= max(errors) - 0.02
    assert torch.equal(
        choose_qparams(x, dtype, (1, size))[0], x.abs().amax(1, keepdim=True) / chosen
    )


def test_quant_max_of_blocks():
    """Follows the block that is asked for, not the sizes of a tensor, and is for integers with a sign."""
    assert quant_max_of(DTYPES["int8"], (1, 128)) == 127
    assert quant_max_of(DTYPES["int8"], (4, 32)) == 127
    for block in ((1, -1), (-1, -1), (1, 512), (128, 128)):
        assert quant_max_of(DTYPES["int8"], block) == 127.5
    assert quant_max_of(DTYPES["int4"], (1, 32)) == 7.5
    for name in ("f8e4m3", "nf4", "uint8", "int1", "ternary"):
        assert quant_max_of(DTYPES[name], (1, 32)) == DTYPES[name].quant_max
