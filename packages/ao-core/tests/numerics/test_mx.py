"""E8M0 scales against exact arithmetic on Python fractions, gfloat and ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.block import BlockFormatInfo, compute_scale_amax, quantize_block

from ao_core.dtypes import CODED_DTYPES
from ao_core.errors import ConfigError
from ao_core.numerics import (
    MX_MODES,
    choose_e8m0,
    choose_qparams,
    decode_e8m0,
    dequantize_affine,
    encode_e8m0,
    quantize_affine,
)

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}
#: greatest value and bits of mantissa of the element formats of MX v1.0; int8 without its 2**-6
ELEMENTS = {
    "f8e4m3": (448, 3),
    "f8e5m2": (57344, 2),
    "f6e3m2": (28, 2),
    "f6e2m3": (Fraction(15, 2), 3),
    "f4e2m1": (6, 1),
    "int8": (127, 6),
}
every_element = pytest.mark.parametrize("name", ELEMENTS)
every_mode = pytest.mark.parametrize("mode", MX_MODES)


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def ceil_log2(x: Fraction) -> int:
    exponent = floor_log2(x)
    return exponent if Fraction(2) ** exponent == x else exponent + 1


def expected_exponent(absmax: Fraction, name: str, mode: str) -> int:
    """The shared exponent by the definition of each mode, clamped to what E8M0 holds."""
    greatest, mantissa_bits = ELEMENTS[name]
    emax = floor_log2(Fraction(greatest))
    if mode == "floor":
        exponent = floor_log2(absmax) - emax
    elif mode == "ceil":
        exponent = ceil_log2(absmax) - emax
    elif mode == "even":
        unit = Fraction(2) ** (floor_log2(absmax) - mantissa_bits)
        rounded = math.floor(absmax / unit + Fraction(1, 2)) * unit
        exponent = floor_log2(rounded) - emax
    else:
        exponent = ceil_log2(absmax / greatest)
    return min(max(exponent, -127), 127)


def hard_cases() -> torch.Tensor:
    """Positive finite float32: every exponent with the mantissas at which some mode changes."""
    edges = [1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.984375, 1.9921875, 448 / 256, 127 / 64]
    mantissas = (torch.tensor(edges).view(torch.int32) & 0x7FFFFF)[:, None]
    mantissas = torch.cat([mantissas - 1, mantissas, mantissas + 1]).clamp(0, 0x7FFFFF).unique()
    exponents = torch.arange(255, dtype=torch.int32)[:, None] << 23
    return (exponents | mantissas).flatten().view(torch.float32)[1:]


@every_mode
@every_element
def test_modes_are_exact(name: str, mode: str):
    absmax = hard_cases()
    dtype = DTYPES[name]
    scale, _ = choose_qparams(absmax[:, None], dtype, (1, 1), scale_dtype="e8m0", mx_mode=mode)
    assert scale.dtype == torch.float8_e8m0fnu
    got = (scale.view(torch.uint8).flatten().int() - 127).tolist()
    expected = [expected_exponent(Fraction(x), name, mode) for x in absmax.tolist()]
    assert got == expected


@every_mode
def test_zero_infinity_and_nan(mode: str):
    absmax = torch.tensor([0.0, math.inf, math.nan])
    scale = choose_e8m0(absmax, 6.0, mode, step=2.0)
    assert scale.tolist()[0] == 1.0
    assert scale[1:].isnan().all()


def test_the_modes_differ_where_they_should():
    absmax = torch.tensor([4.0, 5.0, 6.0, 6.5, 7.0, 7.5])
    chosen = {mode: choose_e8m0(absmax, 6.0, mode, step=2.0).tolist() for mode in MX_MODES}
    assert chosen == {
        "floor": [1, 1, 1, 1, 1, 1],
        "ceil": [1, 2, 2, 2, 2, 2],
        "even": [1, 1, 1, 1, 2, 2],
        "rceil": [1, 1, 1, 2, 2, 2],
    }


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="mx_mode='round'.*floor, ceil, even, rceil"):
        choose_e8m0(torch.ones(1), 6.0, "round")


def test_every_code_as_in_ml_dtypes_and_gfloat():
    codes = np.arange(256, dtype=np.uint8)
    got = decode_e8m0(torch.from_numpy(codes))
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(
        got.numpy(), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    info = gfloat.formats.format_info_ocp_e8m0
    exact = np.array([gfloat.decode_float(info, code).fval for code in range(256)])
    np.testing.assert_array_equal(got.double().numpy(), exact)
    assert torch.equal(encode_e8m0(got), torch.from_numpy(codes))


def test_other_scales_round_to_the_nearer_power():
    scale = torch.tensor([1.0, 1.25, 1.4999999, 1.5, 1.75, 3.0, math.inf, math.nan])
    assert encode_e8m0(scale).tolist() == [127, 127, 127, 128, 128, 129, 255, 255]


@pytest.mark.parametrize("name", sorted(set(ELEMENTS) - {"int8"}))
def test_blocks_of_32_quantize_as_in_gfloat(name: str):
    """The whole of MX v1.0, section 6.3, against an independent implementation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 32, generator=generator)
    x = x * torch.exp2(torch.randint(-30, 30, (40, 1), generator=generator))
    kind = {"f8": "mxfp8", "f6": "mxfp6", "f4": "mxfp4"}[name[:2]]
    info: BlockFormatInfo = getattr(gfloat.formats, f"format_info_{kind}_{name[2:]}")
    expected = [quantize_block(info, row, compute_scale_amax) for row in x.double().numpy()]
    scale, zero_point = choose_qparams(x, DTYPES[name], (1, 32), scale_dtype="e8m0")
    assert zero_point is None
    codes = quantize_affine(x, DTYPES[name], (1, 32), scale)
    got = dequantize_affine(codes, DTYPES[name], (1, 32), scale)
    np.testing.assert_array_equal(got.double().numpy(), np.stack(expected))


@pytest.mark.parametrize("dtype", CODED_DTYPES, ids=lambda dtype: dtype.name)
@every_mode
def test_every_format_gets_a_usable_scale(dtype, mode: str):
    """Within a factor of two of the ideal one; "rceil" never below it."""
    x = torch.rand(20, 32, generator=torch.Generator().manual_seed(0)) + 1e-3
    scale, _ = choose_qparams(x, dtype, (1, 32), scale_dtype="e8m0", mx_mode=mode)
    ideal = x.amax(1) / (max(1.0, dtype.max) if dtype.kind == "int" else dtype.quant_max)
    ratio = scale.float().flatten() / ideal
    assert (ratio > (1.0 - 1e-6 if mode == "rceil" else 0.5)).all()
    assert (ratio <= (2.0 if mode == "rceil" else 4.0)).all()
