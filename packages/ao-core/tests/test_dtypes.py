"""The built-in number formats as records, and the constructors for more."""

from __future__ import annotations

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_core.dtypes import (
    BUILTIN_DTYPES,
    CODED_DTYPES,
    DENSE_DTYPES,
    float_dtype,
    int_dtype,
    lut_dtype,
)
from ao_core.errors import ConfigError
from ao_core.numerics import float_format
from ao_core.records import DType

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}
every_dtype = pytest.mark.parametrize("dtype", CODED_DTYPES, ids=lambda dtype: dtype.name)
#: formats that ml_dtypes has too, under its name
IN_ML_DTYPES = {
    "int1": "int1", "int2": "int2", "int4": "int4",
    "uint1": "uint1", "uint2": "uint2", "uint4": "uint4",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "f6e3m2": "float6_e3m2fn", "f6e2m3": "float6_e2m3fn", "f4e2m1": "float4_e2m1fn",
}  # fmt: skip


def all_codes(dtype: DType) -> torch.Tensor:
    return torch.arange(1 << dtype.bits, dtype=torch.uint8)


def test_the_list_is_complete():
    assert BUILTIN_DTYPES == CODED_DTYPES + DENSE_DTYPES
    assert [dtype.name for dtype in DENSE_DTYPES] == ["bf16", "fp16", "fp32"]
    assert list(DTYPES) == [
        *(f"int{bits}" for bits in range(1, 9)),
        *(f"uint{bits}" for bits in range(1, 9)),
        "ternary",
        "f8e5m2", "f8e4m3", "f8e3m4", "f8e2m5", "f8e1m6",
        "f7e4m2", "f7e3m3", "f7e2m4", "f7e1m5",
        "f6e4m1", "f6e3m2", "f6e2m3", "f6e1m4",
        "f5e3m1", "f5e2m2", "f5e1m3",
        "f4e2m1", "f4e1m2",
        "f3e1m1",
        "nf4",
    ]  # fmt: skip


@every_dtype
def test_the_record_agrees_with_its_functions(dtype: DType):
    values = dtype.decode(all_codes(dtype))
    assert values.dtype == torch.float32
    finite = values[values.isfinite()]
    assert (dtype.min, dtype.max) == (finite.min(), finite.max())
    assert dtype.kind in {"int", "float", "lut"}
    assert dtype.storage.itemsize == 1
    assert dtype.summary
    if dtype.kind == "int":
        half_a_step = 0.5 if dtype.min < 0 and dtype.name != "int1" else 0.0
        assert dtype.quant_max == max(dtype.max, 1 if dtype.min < 0 else 0) + half_a_step
    else:
        assert dtype.quant_max == finite.abs().max()


@every_dtype
def test_encode_inverts_decode_on_every_code(dtype: DType):
    codes = all_codes(dtype)
    values = dtype.decode(codes)
    again = dtype.encode(values)
    assert again.dtype == torch.uint8
    special = {"ternary": [3], "f8e4m3": [0x7F, 0xFF]}
    special["f8e5m2"] = [*range(0x7C, 0x80), *range(0xFC, 0x100)]
    for code in special.get(dtype.name, []):
        if dtype.name == "ternary":
            assert (values[code], again[code]) == (1, 2)
        elif values[code].isnan():
            assert dtype.decode(again)[code].isnan()
        else:  # infinities saturate
            assert dtype.decode(again)[code] == math.copysign(dtype.max, values[code])
    ordinary = [code for code in codes.tolist() if code not in special.get(dtype.name, [])]
    assert torch.equal(again[ordinary], codes[ordinary])


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name: str):
    other = np.dtype(getattr(ml_dtypes, IN_ML_DTYPES[name]))
    codes = all_codes(DTYPES[name])
    expected = codes.numpy().view(other).astype(np.float32)
    np.testing.assert_array_equal(DTYPES[name].decode(codes).numpy(), expected)


@pytest.mark.parametrize("name", ["int8", "uint8", "f8e4m3", "f8e5m2"])
def test_storage_holds_the_codes_as_they_are(name: str):
    """torch reads the bytes of an 8-bit format as the same values."""
    dtype = DTYPES[name]
    stored = all_codes(dtype).view(dtype.storage).float()
    np.testing.assert_array_equal(dtype.decode(all_codes(dtype)).numpy(), stored.numpy())
    assert name == "uint8" or dtype.storage != torch.uint8


@every_dtype
def test_records_pickle_and_deepcopy(dtype: DType):
    x = torch.linspace(-3, 3, 50)
    for twin in (pickle.loads(pickle.dumps(dtype)), copy.deepcopy(dtype)):
        assert (twin.name, twin.min, twin.max, twin.quant_max) == (
            dtype.name,
            dtype.min,
            dtype.max,
            dtype.quant_max,
        )
        codes = twin.encode(x)
        assert torch.equal(codes, dtype.encode(x))
        assert torch.equal(twin.decode(codes), dtype.decode(codes))


@every_dtype
def test_saturation_and_zero(dtype: DType):
    x = torch.tensor([1e30, -1e30, math.inf, -math.inf, 0.0])
    assert dtype.decode(dtype.encode(x)).tolist() == [
        dtype.max, dtype.min, dtype.max, dtype.min, 0.0,
    ]  # fmt: skip


def test_constructors_make_new_formats():
    assert int_dtype("mine", 5).min == -16
    assert int_dtype("mine", 5, signed=False).max == 31
    e3m1 = float_dtype("mine", float_format(3, 1))
    assert (e3m1.bits, e3m1.max, e3m1.storage) == (5, 24.0, torch.uint8)
    book = lut_dtype("mine", [-1, 0, 0.1])
    assert (book.bits, book.min, book.quant_max) == (2, -1.0, 1.0)


@pytest.mark.parametrize("bits", [0, 9])
def test_int_dtype_names_a_bad_width(bits: int):
    with pytest.raises(ConfigError, match=f"bits={bits}: an integer format has 1 to 8 bits"):
        int_dtype("mine", bits)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0], "2 to 256 of them, got 1"),
        (list(range(257)), "2 to 256 of them, got 257"),
        ([0.0, 0.0], "strictly increasing"),
        ([1.0, 0.0], "strictly increasing"),
        ([0.0, math.nan], "strictly increasing"),
        ([0.0, math.inf], "finite"),
        ([1.0, 1.0 + 1e-12], "in float32"),
    ],
)
def test_codebook_dtype_names_bad_values(values: list[float], reason: str):
    with pytest.raises(ConfigError, match=reason):
        lut_dtype("mine", values)
