"""The assembly of the Triton kernels: every word there is, through the text that the kernels hold."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_core import lut_dtype
from ao_core.ext import codebook_dtype, registry
from ao_kernels.cpu.codes import codes_of
from ao_kernels.triton.w4a8.layout import stored
from ao_kernels.triton.w4a8.ptx import to_float
from ao_kernels.triton.weight_only.decode_ptx import integers
from ao_kernels.triton.weight_only.float4_ptx import (
    PLACES,
    float4,
    gather_bits,
    mantissa_of,
    spread_bits,
)
from ao_kernels.triton.weight_only.formats import Format, format_of
from ao_kernels.triton.weight_only.lut_ptx import load_table
from ao_kernels.triton.weight_only.packing import interleave, pack_words, separate, unpack_words
from ao_kernels.triton.weight_only.scales import KINDS, load_bytes
from ao_triton_checks.asm import run

RNG = np.random.default_rng(0)
CODEBOOKS = [
    lut_dtype("two", (-3.0, 0.5)),
    lut_dtype("four", (-1.25, -0.3, 0.1, 7.0)),
    lut_dtype("six", (-2.0, -1.5, 0.0, 0.7, 1.0, 3.3)),
]


def formats():
    """Of each text that the kernels can hold, the first format that needs it."""
    first = {}
    for dtype in [*(dtype for _, dtype in registry.dtypes.items()), *CODEBOOKS]:
        fmt = format_of(dtype)
        if isinstance(fmt, Format):
            made = fmt.assembly
            first.setdefault((made.func, made.args, *made.keywords.items()), dtype)
    return list(first.values())


def values_of(fmt, element):
    """What matmuls take of each stored code, in an element's precision."""
    dtype = ml_dtypes.bfloat16 if element == "bf16" else np.float16
    return (np.array(fmt.values, np.float32) - np.float32(fmt.offset)).astype(dtype)


def table_registers(fmt, element):
    """What `load_table` loads, from where the kernel finds it in the part `table`."""
    if not fmt.is_lut:
        return {}
    start = fmt.lut_start + 16 * (element == "fp16")
    words = fmt.table().numpy().view(np.uint32)[start:][:16]
    assert np.array_equal(words[:8], words[8:])
    names = re.findall(r"ao_\w+", load_table().partition(";")[0])
    return dict(zip(names, words[:8], strict=True))


def many_words(fmt):
    """int16 […, 2, words]: where a unit is one word every one, otherwise every code in every place."""
    count = 1 << (16 if fmt.words == 1 else 13)
    orders = [RNG.permutation(1 << 16)[:count] for _ in range(2 * fmt.words)]
    return torch.from_numpy(np.stack(orders, -1).astype(np.uint16).view(np.int16)).unflatten(
        -1, (2, -1)
    )


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", formats(), ids=lambda dtype: dtype.name)
def test_every_word(dtype, element):
    """In either half of a register; bit for bit, -0 included."""
    fmt = format_of(dtype)
    words = many_words(fmt)
    codes = unpack_words(words, fmt.bits).numpy()
    assert all(len(np.unique(codes[..., j])) == 1 << fmt.bits for j in range(fmt.planes))
    change = {"pairs": interleave, "spread": spread_bits, "planes": lambda words: words}[fmt.order]
    halves = change(words.mT).mT.numpy().view(np.uint16).astype(np.uint32)
    registers = halves[:, 0] | halves[:, 1] << np.uint32(16)
    text = fmt.assembly(element)
    planes = run(text, *registers.T, given=table_registers(fmt, element))
    assert len(planes) == fmt.planes
    expected = values_of(fmt, element)
    finite = np.isfinite(expected.astype(np.float32))
    finite[dtype.codes :] = False  # there are no such codes
    assert finite.sum() >= dtype.codes - 8
    for j, plane in enumerate(planes):
        numbers = np.ascontiguousarray(plane).view(expected.dtype).reshape(-1, 2)
        usual = finite[codes[..., j]]
        same = numbers.view(np.uint16) == expected.view(np.uint16)[codes[..., j]]
        assert same[usual].all()


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


@pytest.mark.parametrize(
    ("name", "element", "infinity"),
    [("f8e4m3", "bf16", 480), ("f8e4m3", "fp16", 480), ("f8e5m2", "bf16", 65536)],
)
def test_what_is_not_finite_is_large(name, element, infinity):
    fmt = format_of(registry.dtypes.get(name))
    code = next(code for code, value in enumerate(fmt.values) if not np.isfinite(value))
    for both in (code, code | 128):
        (plane, _) = run(fmt.assembly(element), np.asarray([both], np.uint32))
        dtype = ml_dtypes.bfloat16 if element == "bf16" else np.float16
        assert float(plane.view(dtype)[0]) == (infinity if both == code else -infinity)


def test_float16_has_what_e5m2_has():
    text = format_of(registry.dtypes.get("f8e5m2")).assembly("fp16")
    words = np.arange(1 << 16, dtype=np.uint32)
    low, high = run(text, words)
    assert np.array_equal(low, (words & np.uint32(255)) << np.uint32(8))
    assert np.array_equal(high, words & np.uint32(0xFF00))


def test_all_but_codebooks_are_exact():
    """Both elements hold every value, so nothing is rounded."""
    for dtype in formats():
        fmt = format_of(dtype)
        if dtype.kind == "lut" and dtype.name != "ternary":
            continue
        exact = np.array(fmt.values) - fmt.offset
        for element in ("bf16", "fp16"):
            found = values_of(fmt, element).astype(float)
            assert np.array_equal(found, exact, equal_nan=True), dtype.name


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


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_and_back(bits):
    """Words and codes are as many: either order gives back what it was given."""
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(
        -(1 << 15), 1 << 15, (5, 4, Format(bits, 0, (), 0, str).words), generator=generator
    ).to(torch.int16)
    codes = unpack_words(words, bits)
    assert int(codes.max()) == (1 << bits) - 1
    assert torch.equal(pack_words(codes, bits), words)
    assert torch.equal(separate(interleave(words.mT)), words.mT)


def test_a_constant_that_is_rounded_raises():
    with pytest.raises(ValueError, match="bf16 does not hold it"):
        integers(4, -1001, "bf16")


@pytest.mark.parametrize("name", ["dynamic8", "bf16"])
def test_formats_that_are_not_known(name):
    assert name in _refusal(registry.dtypes.get(name))


def test_integers_that_begin_elsewhere_are_looked_up():
    for values in ((0.5, 1.5, 2.5, 3.5), (200.0, 201.0)):
        fmt = format_of(lut_dtype("odd", values))
        assert fmt.is_lut
        assert fmt.values == values


def test_launches_make_no_text_anew():
    for dtype in formats():
        fmt = format_of(dtype)
        assert format_of(dtype) is fmt
        assert all(fmt.assembly(element) is fmt.assembly(element) for element in ("bf16", "fp16"))
    assert load_bytes("e8m0", 4) is load_bytes("e8m0", 4)
    assert load_table() is load_table()


def test_tables_have_no_values_of_their_own():
    assert "codebook4" in _refusal(codebook_dtype("codebook4", 4))


def _refusal(dtype):
    found = format_of(dtype)
    assert not isinstance(found, Format)
    return found
