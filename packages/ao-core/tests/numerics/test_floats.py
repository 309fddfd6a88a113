"""Float formats of at most 8 bits: every code and every rounding boundary."""

from __future__ import annotations

import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.errors import ConfigError
from ao_core.numerics import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FloatFormat,
    decode_float,
    encode_float,
    float_format,
)

NAMED = {"E4M3": E4M3, "E5M2": E5M2, "E3M2": E3M2, "E2M3": E2M3, "E2M1": E2M1}
GENERIC = {f"generic_E{e}M{m}": float_format(e, m) for e in range(1, 5) for m in range(1, 8 - e)}
FORMATS = (
    NAMED
    | GENERIC
    | {
        "E3M4_with_nan": FloatFormat(3, 4, bias=3, has_nan=True),
        "E5M1_as_ieee": FloatFormat(5, 1, bias=15, has_inf=True, has_nan=True),
        "E4M3_other_bias": FloatFormat(4, 3, bias=11),
    }
)
ML_DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_named = pytest.mark.parametrize("name", NAMED)


def defined_value(fmt: FloatFormat, code: int) -> Fraction | float:
    """The value of a code by the formula of the OCP specifications, in exact arithmetic."""
    mantissa = code & ((1 << fmt.mbits) - 1)
    exponent = (code >> fmt.mbits) & ((1 << fmt.ebits) - 1)
    sign = -1 if code >> (fmt.ebits + fmt.mbits) & 1 else 1
    if exponent == (1 << fmt.ebits) - 1:
        if fmt.has_inf:
            return math.nan if mantissa else sign * math.inf
        if fmt.has_nan and mantissa == (1 << fmt.mbits) - 1:
            return math.nan
    if exponent == 0:
        return sign * Fraction(mantissa, 1 << fmt.mbits) * Fraction(2) ** (1 - fmt.bias)
    return sign * (1 + Fraction(mantissa, 1 << fmt.mbits)) * Fraction(2) ** (exponent - fmt.bias)


def finite_magnitudes(fmt: FloatFormat) -> np.ndarray:
    """Value of each non-negative finite code, by code, as float64."""
    values = [float(defined_value(fmt, code)) for code in range(fmt.codes // 2)]
    return np.array([v for v in values if math.isfinite(v)])


def nearest_code(fmt: FloatFormat, x: np.ndarray) -> np.ndarray:
    """Brute force in float64: nearest value, the even code at a tie, saturating; no NaN."""
    values = finite_magnitudes(fmt)
    distance = np.abs(np.minimum(np.abs(x), fmt.max)[:, None] - values)
    best = distance.min(axis=1, keepdims=True)
    # A tie is between two neighbours, of which one is even.
    candidates = np.where(distance == best, np.arange(len(values)), -1)
    high = candidates.max(axis=1)
    tied = (distance == best).sum(axis=1) == 2
    code = np.where(tied & (high % 2 == 1), high - 1, high)
    return (code | (np.signbit(x) << (fmt.bits - 1))).astype(np.uint8)


def check_encoding(fmt: FloatFormat, x: torch.Tensor) -> None:
    got = encode_float(x, fmt)
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got.numpy(), nearest_code(fmt, x.double().numpy()))


@every_format
def test_every_code_decodes_to_its_definition(fmt: FloatFormat):
    got = decode_float(torch.arange(fmt.codes, dtype=torch.uint8), fmt)
    assert got.dtype == torch.float32
    for code, value in enumerate(got.tolist()):
        expected = defined_value(fmt, code)
        if math.isnan(expected):
            assert math.isnan(value)
        else:
            assert value == expected
            assert math.copysign(1, value) == (-1 if code >= fmt.codes // 2 else 1)


@every_named
def test_every_code_decodes_as_in_ml_dtypes(name: str):
    codes = np.arange(NAMED[name].codes, dtype=np.uint8)
    got = decode_float(torch.from_numpy(codes), NAMED[name]).numpy()
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(expected)[number])


@every_named
def test_every_code_decodes_as_in_gfloat(name: str):
    info = getattr(gfloat.formats, f"format_info_ocp_{name.lower()}")
    got = decode_float(torch.arange(NAMED[name].codes, dtype=torch.uint8), NAMED[name])
    expected = [gfloat.decode_float(info, code).fval for code in range(NAMED[name].codes)]
    np.testing.assert_array_equal(got.numpy(), np.array(expected, dtype=np.float32))


@every_format
def test_properties_follow_from_the_codes(fmt: FloatFormat):
    values = finite_magnitudes(fmt)
    assert fmt.max == values[-1]
    assert fmt.smallest_subnormal == values[1]
    assert fmt.smallest_normal == values[1 << fmt.mbits]
    assert 2.0**fmt.emin == fmt.smallest_normal
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)
    if fmt.has_nan:
        assert math.isnan(defined_value(fmt, fmt.nan_code))


@pytest.mark.parametrize(
    ("fmt", "greatest", "normal", "subnormal"),
    [
        (E4M3, 448.0, 2.0**-6, 2.0**-9),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16),
        (E3M2, 28.0, 0.25, 0.0625),
        (E2M3, 7.5, 1.0, 0.125),
        (E2M1, 6.0, 1.0, 0.5),
    ],
    ids=NAMED,
)
def test_extremes_from_the_ocp_tables(fmt, greatest, normal, subnormal):
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == (greatest, normal, subnormal)


@every_format
def test_encode_inverts_decode(fmt: FloatFormat):
    codes = torch.arange(fmt.codes, dtype=torch.uint8)
    values = decode_float(codes, fmt)
    finite = values.isfinite()
    again = encode_float(values, fmt)
    assert torch.equal(again[finite], codes[finite])
    assert decode_float(again[values.isnan()], fmt).isnan().all()


@every_format
def test_every_midpoint_and_its_neighbours(fmt: FloatFormat):
    """Midpoints of neighbouring values are exact in float32, as are the values themselves."""
    values = torch.from_numpy(finite_magnitudes(fmt)).float()
    last = values[-1] - values[-2]
    values = torch.cat([values, (values[-1] + last)[None]])
    middle = (values[:-1] + values[1:]) / 2
    points = torch.cat([values, middle])
    around = torch.cat(
        [points, *(points.nextafter(torch.tensor(s)) for s in (math.inf, -math.inf))]
    )
    check_encoding(fmt, torch.cat([around, -around]))


@every_format
def test_the_whole_range_of_float32(fmt: FloatFormat):
    exponents = torch.arange(256, dtype=torch.int32)[:, None] << 23
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF])
    patterns = (exponents | mantissas.int()).flatten().view(torch.float32)
    patterns = patterns[~patterns.isnan()]
    check_encoding(fmt, torch.cat([patterns, -patterns]))


@every_named
def test_all_bfloat16_inputs_as_in_ml_dtypes(name: str):
    """Alike where the input is in range; beyond, this library saturates and ml_dtypes may not."""
    fmt = NAMED[name]
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    got = encode_float(x, fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = x.float().numpy().astype(ML_DTYPES[name]).view(np.uint8)
    # Below max plus half a step both round to nearest.
    step = 2.0 ** (fmt.emax - fmt.mbits)
    inside = (x.float().abs() < fmt.max + step / 2).numpy()
    np.testing.assert_array_equal(got.numpy()[inside], cast[inside])
    beyond = ~inside & ~x.isnan().numpy()
    saturated = torch.where(x < 0, -fmt.max, fmt.max)
    assert torch.equal(decode_float(got, fmt)[beyond], saturated[beyond].float())
    decoded_nan = decode_float(got[x.isnan()], fmt)
    assert decoded_nan.isnan().all() if fmt.has_nan else (decoded_nan == 0).all()


@every_format
def test_special_values(fmt: FloatFormat):
    x = torch.tensor([math.inf, -math.inf, 3e38, -3e38, math.nan, 0.0, -0.0, -1e-45])
    values = decode_float(encode_float(x, fmt), fmt)
    assert values[:4].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert math.isnan(values[4]) if fmt.has_nan else values[4] == 0
    assert values[5:].tolist() == [0.0, 0.0, 0.0]
    assert torch.signbit(values[5:]).tolist() == [False, True, True]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
)
def test_any_float32_rounds_to_nearest(name: str, values: list[float]):
    check_encoding(FORMATS[name], torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=["E4M3", "E2M1"])
def test_other_input_dtypes_round_through_float32(fmt: FloatFormat, dtype: torch.dtype):
    x = (torch.randn(500) * 3).to(dtype)
    assert torch.equal(encode_float(x, fmt), encode_float(x.float(), fmt))


@every_format
def test_inputs_are_left_alone_and_shapes_kept(fmt: FloatFormat):
    x = torch.randn(3, 4, 5).transpose(0, 2).requires_grad_()
    before = x.detach().clone()
    codes = encode_float(x, fmt)
    kept = codes.clone()
    values = decode_float(codes, fmt)
    assert codes.shape == values.shape == x.shape
    assert torch.equal(x, before)
    assert torch.equal(codes, kept)
    assert (
        encode_float(torch.empty(0, 3), fmt).shape
        == decode_float(torch.empty(0, 3, dtype=torch.uint8), fmt).shape
    )
    assert not codes.requires_grad


@pytest.mark.parametrize(("ebits", "mbits"), [(0, 1), (0, 3), (5, 1), (6, 1)])
def test_exponents_out_of_range(ebits: int, mbits: int):
    with pytest.raises(ConfigError, match=f"ebits={ebits}, mbits={mbits}"):
        float_format(ebits, mbits)


def test_other_formats_that_cannot_work():
    with pytest.raises(ConfigError, match="mbits=0"):
        float_format(4, 0)
    with pytest.raises(ConfigError, match="at most 8 in all"):
        float_format(4, 4)
    with pytest.raises(ConfigError, match="bias=61"):
        FloatFormat(4, 3, bias=61)
    with pytest.raises(ConfigError, match="ebits=4"):
        FloatFormat(4, 3, bias=7, has_inf=True, has_nan=True)
