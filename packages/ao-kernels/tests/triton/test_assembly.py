"""The assembly of the Triton kernels: every word there is, through the text that the kernels hold."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_core.dtypes import codebook_dtype, table_dtype
from ao_core.registry import registry
from ao_kernels.testing.asm import run
from ao_kernels.triton.assembly import load_table
from ao_kernels.triton.decoding import integers
from ao_kernels.triton.formats import Format, format_of
from ao_kernels.triton.words import interleave, pack_words, separate, unpack_words

RNG = np.random.default_rng(0)
CODEBOOKS = [
    codebook_dtype("two", (-3.0, 0.5)),
    codebook_dtype("four", (-1.25, -0.3, 0.1, 7.0)),
    codebook_dtype("six", (-2.0, -1.5, 0.0, 0.7, 1.0, 3.3)),
]


def formats():
    """Of each text that the kernels can hold, the first format that needs it."""
    first = {}
    for dtype in [*(dtype for _, dtype in registry.dtypes.items()), *CODEBOOKS]:
        fmt = format_of(dtype)
        if isinstance(fmt, Format):
            first.setdefault((fmt.assembly.func, fmt.assembly.args), dtype)
    return list(first.values())


def values_of(fmt, element):
    """What products take of each stored code, in an element's precision."""
    dtype = ml_dtypes.bfloat16 if element == "bf16" else np.float16
    return (np.array(fmt.values, np.float32) - np.float32(fmt.offset)).astype(dtype)


def table_registers(fmt, element):
    """What `load_table` loads, from where the kernel finds it in the part `table`."""
    if not fmt.looked_up:
        return {}
    start = len(fmt.values) + 16 * (element == "fp16")
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
    stored = interleave(words.mT).mT if fmt.looked_up else words
    halves = stored.numpy().view(np.uint16).astype(np.uint32)
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
        if dtype.kind == "codebook" and dtype.name != "ternary":
            continue
        exact = np.array(fmt.values) - fmt.offset
        for element in ("bf16", "fp16"):
            found = values_of(fmt, element).astype(float)
            assert np.array_equal(found, exact, equal_nan=True), dtype.name


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
        fmt = format_of(codebook_dtype("odd", values))
        assert fmt.looked_up
        assert fmt.values == values


def test_tables_have_no_values_of_their_own():
    assert "lut4" in _refusal(table_dtype("lut4", 4))


def _refusal(dtype):
    found = format_of(dtype)
    assert not isinstance(found, Format)
    return found
