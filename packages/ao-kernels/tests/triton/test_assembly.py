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
from ao_kernels.cpu.codes import codes_of
from ao_kernels.testing.asm import run
from ao_kernels.triton.assembly import load_table, to_float
from ao_kernels.triton.float4 import PLACES, float4, gather_bits, mantissa_of, spread_bits
from ao_kernels.triton.formats import Format, format_of
from ao_kernels.triton.plane32 import stored
from ao_kernels.triton.scales import KINDS, load_bytes

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
            if fmt.spread:
                codes = sum(
                    (pairs >> np.uint32((place + 16 * half) % 32) & 1) << np.uint32(bit)
                    for bit, place in enumerate(PLACES[j])
                )
            assert np.array_equal(numbers[:, half], expected[codes])


@pytest.mark.parametrize("name", ["f4e2m1", "f4e1m2"])
def test_floats_of_4_bits_are_few_instructions(name):
    """In bfloat16 as many as integers and two more for e2m1; in float16 no more than a lookup has."""
    counts = [
        sum(not line.startswith((".reg", "mov", "{", "}")) for line in text.splitlines())
        for text in map(format_of(registry.dtypes.get(name)).assembly, ("bf16", "fp16"))
    ]
    assert counts == {"f4e2m1": [13, 21], "f4e1m2": [21, 20]}[name]


def test_bits_of_codes_are_spread_and_gathered():
    words = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    words = torch.stack([words, words.roll(12345)], -1).flatten()
    there = spread_bits(words)
    assert torch.equal(gather_bits(there), words)
    pairs = there.view(torch.int32).long() & 0xFFFFFFFF
    for j, places in enumerate(PLACES):
        for half in range(2):
            codes = words[half::2].long() >> 4 * j & 15
            for bit, place in enumerate(places):
                assert torch.equal(pairs >> (place + 16 * half) % 32 & 1, codes >> bit & 1)


def test_which_values_are_floats_of_4_bits():
    found = {
        name: mantissa_of(codes_of(registry.dtypes.get(name)).values)
        for name in ("f4e2m1", "f4e1m2", "nf4", "int4", "uint4", "iq4_nl")
    }
    assert found == dict.fromkeys(found) | {"f4e2m1": 1, "f4e1m2": 2}
    powers = (0.0, *(2.0**i for i in range(-2, 5)))
    values = (*powers, *(-power for power in powers))
    assert mantissa_of(values) == 0
    pairs = np.arange(1 << 16, dtype=np.uint32) * np.uint32(0x10001)
    for j, plane in enumerate(run(float4("bf16", 0, 0.25), pairs)):
        codes = sum((pairs >> np.uint32(p) & 1) << np.uint32(i) for i, p in enumerate(PLACES[j]))
        bits = (plane & np.uint32(0xFFFF)) << np.uint32(16)
        assert np.array_equal(bits.view(np.float32), np.array(values, np.float32)[codes])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "sm80"), [("e8m0", False), ("e4m3", False), ("e4m3", True)], ids=str
)
def test_every_scale_of_8_bits(kind, sm80, count):
    """In every place, beside every other: exact in float32, with subnormal numbers, NaN and -0."""
    codes = np.stack([RNG.permutation(np.arange(256)) for _ in range(16)], -1).astype(np.uint8)
    words = codes.reshape(-1, 4).view(np.uint32).ravel()
    found = run(load_bytes(kind, count, sm80=sm80), words)
    assert len(found) == count
    dtype = next(dtype for dtype, name in KINDS.items() if name == kind)
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    if kind == "e8m0":  # by the specification, not by torch alone
        assert (expected[0], np.isnan(expected[255])) == (2.0**-127, True)
    for i, numbers in enumerate(found):
        wanted = expected[words >> np.uint32(8 * i) & np.uint32(255)]
        exact = numbers.view(np.float32)
        assert np.array_equal(exact, wanted, equal_nan=True)
        assert np.array_equal(np.signbit(exact)[wanted == 0], np.signbit(wanted)[wanted == 0])


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
