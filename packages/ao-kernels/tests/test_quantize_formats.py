"""Encoding by the C++ code is what each number format's own `encode` does, for all numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ao_core import DType, float_dtype, int_dtype, lut_dtype
from ao_core.ext import registry
from ao_core.ext.numerics import FloatFormat
from ao_kernels.cpu.formats import Format, format_of
from ao_kernels.cpu.library import load

load()
BUILTIN = [dtype for dtype in registry.dtypes.values() if dtype.kind not in ("codebook", "dense")]
#: formats as another package might add them
OTHERS = (
    lut_dtype("two", [-1.0, 3.0]),
    lut_dtype("three", [-1e30, 0.0, 1e-38]),
    lut_dtype("seventeen", [i**3 / 7 for i in range(-8, 9)]),
    lut_dtype("all", sorted(math.copysign((i / 127) ** 2, i) + i * 1e-9 for i in range(-128, 128))),
    float_dtype("e1m2", FloatFormat(1, 2, bias=0)),
    float_dtype("e4m1", FloatFormat(4, 1, bias=20)),
    float_dtype("e3m4", FloatFormat(3, 4, bias=3, has_nan=True)),
    float_dtype("e2m1far", FloatFormat(2, 1, bias=60)),
    int_dtype("short", 5),
)


def encode(fmt: Format, numbers: Tensor) -> Tensor:
    """Codes by the op, with a scale of 1 each."""
    size = numbers.numel()
    op = torch.ops.ao_kernels.encode
    return op(numbers, torch.ones(1), None, *fmt, 1, size, 1, size, False).reshape(-1)


def known(dtype: DType) -> Format:
    fmt = format_of(dtype)
    assert isinstance(fmt, Format), fmt
    return fmt


@pytest.mark.parametrize("dtype", [*BUILTIN, *OTHERS], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits(dtype: DType, storage: torch.dtype) -> None:
    """NaN of both signs are one code: which sign a NaN has depends on how torch computes it."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(storage)
    expected = dtype.encode(numbers.float())
    nan = numbers.isnan()
    expected[nan] = dtype.encode(torch.tensor([math.nan]))
    assert torch.equal(encode(known(dtype), numbers), expected)


@pytest.mark.parametrize("dtype", [*BUILTIN, *OTHERS], ids=lambda dtype: dtype.name)
def test_ties_and_their_neighbours(dtype: DType) -> None:
    """Values, the middle of any two that follow one another, and the floats around all of these."""
    values = dtype.decode(torch.arange(1 << dtype.bits, dtype=torch.uint8))
    values = values[values.isfinite()].unique()
    middle = (values[1:].double() + values[:-1].double()).div(2).float()
    numbers = torch.cat([values, middle, values * 2, torch.tensor([0.0, -0.0])])
    for _ in range(2):
        beside = (numbers.nextafter(torch.tensor(side)) for side in (math.inf, -math.inf))
        numbers = torch.cat([numbers, *beside])
    assert torch.equal(encode(known(dtype), numbers), dtype.encode(numbers))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_any_number(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    for dtype in (*BUILTIN, *OTHERS):
        assert torch.equal(encode(known(dtype), x), dtype.encode(x)), dtype.name


def test_usual_formats_need_no_search() -> None:
    """That is faster, and says that the format has proved to be one of its kind."""
    rules = {"int": 1, "float": 2, "lut": 0}
    for dtype in (*BUILTIN, *OTHERS):
        assert known(dtype).rule == rules[dtype.kind], dtype.name


@pytest.mark.parametrize(
    "name", ["int4", "uint8", "ternary", "f8e4m3", "f8e5m2", "f6e2m3", "f4e2m1"]
)
def test_the_search_gives_the_same(name: str) -> None:
    dtype = registry.dtypes.get(name)
    searching = known(dtype)._replace(rule=0)
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[~numbers.isnan()]
    assert torch.equal(encode(searching, numbers), dtype.encode(numbers.float()))


def towards_zero(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0).trunc().clamp(-8, 7).to(torch.int8).view(torch.uint8) & 15


def alternating(x: Tensor) -> Tensor:
    return (x.nan_to_num(0.0, 0.0, 0.0) * 1e3).floor().remainder(2).to(torch.uint8)


def test_integers_that_round_in_another_way_are_searched() -> None:
    """A format is what its functions do, whatever its kind is called."""
    dtype = replace(registry.dtypes.get("int4"), name="int4toward0", encode=towards_zero)
    fmt = known(dtype)
    assert fmt.rule == 0
    numbers = torch.linspace(-10, 10, 4001)
    assert torch.equal(encode(fmt, numbers), towards_zero(numbers))


def test_what_is_no_row_of_steps_is_refused() -> None:
    dtype = replace(registry.dtypes.get("uint1"), name="alternating", encode=alternating)
    reason = format_of(dtype)
    assert isinstance(reason, str)
    assert reason.startswith("alternating ")
