"""The assembly of the Triton kernels: every word there is, through the text that the kernels hold."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_core.dtypes import table_dtype
from ao_core.registry import registry
from ao_kernels.testing.asm import run
from ao_kernels.triton.assembly import load_table, to_float
from ao_kernels.triton.formats import Format, format_of
from ao_kernels.triton.plane32 import stored

RNG = np.random.default_rng(0)


def values_of(fmt, element):
    """What products take of each stored code, in an element's precision."""
    dtype = ml_dtypes.bfloat16 if element == "bf16" else np.float16
    values = np.array([480.0 if math.isnan(value) else value for value in fmt.values])
    if fmt.bits == 8 and math.isnan(fmt.values[-1]):
        values[255] = -480.0  # see `assembly.e4m3`
    return (values - fmt.offset).astype(np.float32).astype(dtype)


def table_registers(fmt, element):
    """What `load_table` loads, from where the kernel finds it in the part `table`."""
    if not fmt.looked_up:
        return {}
    words = fmt.table().numpy().view(np.uint32)[16 + 16 * (element == "fp16") :][:16]
    assert np.array_equal(words[:8], words[8:])
    names = re.findall(r"ao_\w+", load_table().partition(";")[0])
    return dict(zip(names, words[:8], strict=True))


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int4", "uint4", "nf4", "f4e2m1", "f4e1m2", "int8", "f8e4m3"])
def test_every_word(name, element):
    """In either half of a register, beside every other kind of word; bit for bit, -0 included."""
    fmt = format_of(registry.dtypes.get(name))
    low = np.arange(1 << 16, dtype=np.uint32)
    high = RNG.permutation(low)
    pairs = low | high << np.uint32(16)
    planes = run(fmt.assembly(element), pairs, given=table_registers(fmt, element))
    assert len(planes) == fmt.planes
    expected = values_of(fmt, element).view(np.uint16)
    for j, plane in enumerate(planes):
        numbers = np.ascontiguousarray(plane).view(np.uint16).reshape(-1, 2)
        for half, words in enumerate((low, high)):
            shift = np.uint32(fmt.bits * (2 * j + half if fmt.looked_up else j))
            codes = (pairs if fmt.looked_up else words) >> shift & np.uint32((1 << fmt.bits) - 1)
            assert np.array_equal(numbers[:, half], expected[codes])


def test_integers_and_floats_of_8_bits_are_exact():
    """Both elements hold every value, so nothing is rounded but codebooks."""
    for name in ("int4", "uint4", "f4e2m1", "int8", "f8e4m3"):
        fmt = format_of(registry.dtypes.get(name))
        for element in ("bf16", "fp16"):
            exact = np.nan_to_num(np.array(fmt.values), nan=480) - fmt.offset
            assert np.array_equal(np.abs(values_of(fmt, element).astype(float)), np.abs(exact))


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_every_word_beside_activations_in_8_bits(name, integers):
    """Four words hold four neighbours of eight planes; every pair of bytes, in each of the words."""
    how = stored(name, integers=integers)
    low = np.arange(1 << 16, dtype=np.uint32)
    words = [RNG.permutation(low) | RNG.permutation(low) << np.uint32(16) for _ in range(4)]
    planes = run(how.assembly(), *words)
    assert len(planes) == 8
    for j, plane in enumerate(planes):
        found = np.ascontiguousarray(plane).view(np.int8 if integers else ml_dtypes.float8_e4m3fn)
        bytes_ = np.ascontiguousarray(words[j // 2]).view(np.uint8)
        codes = how.turn(torch.from_numpy(bytes_ >> 4 * (j % 2) & 15)).numpy()
        values = codes.astype(np.int8) - 16 * (codes >= 8) if name == "int4" else codes
        assert np.array_equal(found.astype(np.float64) * how.factor + how.offset, values)


def test_integers_become_floats():
    """All sums of up to 256 products of two signed bytes of which one is a code times 16."""
    sums = np.arange(-(1 << 22), (1 << 22) + 1, dtype=np.int32)
    (found,) = run(to_float(), sums.view(np.uint32))
    assert np.array_equal(found.view(np.float32), sums.astype(np.float32))


@pytest.mark.parametrize("name", ["int3", "uint8", "f8e5m2"])
def test_formats_that_are_not_known(name):
    assert name in _refusal(registry.dtypes.get(name))


def test_tables_have_no_values_of_their_own():
    assert "lut4" in _refusal(table_dtype("lut4", 4))


def _refusal(dtype):
    found = format_of(dtype)
    assert not isinstance(found, Format)
    return found
