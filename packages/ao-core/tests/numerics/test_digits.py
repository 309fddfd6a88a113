"""Codes as digits of bytes: exact in every base and at every length, and the layout that they are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core import Spec, quantize_tensor
from ao_core.dtypes import CODED_DTYPES, lut_dtype
from ao_core.errors import ConfigError, QuantizationError
from ao_core.layouts import Digits
from ao_core.numerics import digits_a_byte, pack_digits, unpack_digits

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}


def test_as_many_as_fit():
    for base in range(2, 257):
        count = digits_a_byte(base)
        assert base**count <= 256 < base ** (count + 1)
    assert digits_a_byte(3) == 5


def test_every_byte_of_trits():
    codes = torch.cartesian_prod(*[torch.arange(3)] * 5).flip(1).to(torch.uint8)
    packed = pack_digits(codes, 3)
    assert packed.flatten().tolist() == list(range(243))
    assert torch.equal(unpack_digits(packed, 3, 5), codes)


@given(st.data())
def test_digits_are_those_of_python_and_unpack_inverts(data: st.DataObject):
    base = data.draw(st.integers(2, 256), label="base")
    shape = (*data.draw(st.lists(st.integers(0, 3), max_size=2)), data.draw(st.integers(0, 23)))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    codes = np.random.default_rng(seed).integers(0, base, shape, dtype=np.uint8)
    packed = pack_digits(torch.from_numpy(codes), base)
    count = digits_a_byte(base)
    assert tuple(packed.shape) == (*shape[:-1], -(-shape[-1] // count))
    for place in np.ndindex(tuple(packed.shape)):
        digits = codes[place[:-1]][count * place[-1] :][:count].tolist()
        assert int(packed[place]) == sum(digit * base**k for k, digit in enumerate(digits))
    assert torch.equal(unpack_digits(packed, base, shape[-1]), torch.from_numpy(codes))


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="base=1: digits have 2 to 256 values"):
        digits_a_byte(1)
    with pytest.raises(ConfigError, match=r"n=11: 11 digits of base 3 take 3 bytes, .* has 2"):
        unpack_digits(torch.zeros(4, 2, dtype=torch.uint8), 3, 11)


def test_the_layout_is_refused_where_packed_is_no_larger():
    refuses = Digits().refuses
    spec = Spec("x", (1, 32))
    for dtype in DTYPES.values():
        assert (refuses(spec, (8, 64), dtype) is None) == (dtype.name == "ternary")
    assert refuses(spec, (8, 64), lut_dtype("five", [-2, -1, 0, 1, 2])) is None
    assert refuses(spec, (8, 64), lut_dtype("seven", list(range(7)))) is not None
    with pytest.raises(QuantizationError, match="2 digits of base 16.*use the layout 'packed'"):
        quantize_tensor(torch.ones(8, 64), Spec("int4", (1, 32), layout="digits"))


@pytest.mark.parametrize("shape", [(7, 77), (3, 5, 11), (1, 1), (0, 9)], ids=str)
def test_ternary_takes_1_6_bits_and_has_the_values_of_2(shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    absmean = (("scale_rule", "absmean"),)
    two, less = (
        quantize_tensor(x, Spec("ternary", (1, 32), layout=layout, options=absmean))
        for layout in ("packed", "digits")
    )
    assert torch.equal(two.dequantize(), less.dequantize())
    assert less.qdata.numel() == x[..., 0].numel() * -(-shape[-1] // 5)
