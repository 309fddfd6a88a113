"""A stranger's number format: posits of 6 bits with 1 bit of exponent, in three orders of their codes.

Gustafson & Yonemoto, "Beating Floating Point at its Own Game: Posit Arithmetic" (2017): the codes, as
integers in two's complement, are in the order of the values, and the least of them is not a number (NaR).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ao_core import DType, WeightOnlyConfig
from ao_core.errors import ConfigError
from ao_core.testing import DTypeSuite, TransformSuite
from ao_core.testing.transforms import SUBJECTS

BITS, NAR = 6, 32


def value_of(code: int) -> float:
    """Of a positive code: a run of equal bits (the regime), its end, one bit of exponent, the fraction."""
    text = f"{code:05b}"
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    rest = text[run + 1 :].ljust(1, "0")
    exponent, fraction = int(rest[0]), rest[1:]
    return 2.0 ** (2 * regime + exponent) * (1 + int(fraction or "0", 2) / 2 ** len(fraction))


#: signed codes from -31 to 31 without 0, and their values, increasing
SIGNED = [*range(-31, 0), *range(1, 32)]
VALUES = [value_of(code) if code > 0 else -value_of(-code) for code in SIGNED]


def encode(x, places, even):
    """The nearest value; 0 is for 0 alone. `places`: the stored code of each of 64 codes."""
    values = torch.tensor(VALUES, dtype=torch.float64, device=x.device)
    bounds = ((values[1:] + values[:-1]) / 2).float()
    if even:  # a value at a bound is the lower one's; where that is odd, the bound belongs to the upper one
        odd = torch.tensor([code % 2 == 1 for code in SIGNED[:-1]], device=x.device)
        bounds = torch.where(odd, torch.nextafter(bounds, torch.tensor(-torch.inf)), bounds)
    x = x.detach().to(torch.float32)
    index = torch.bucketize(x.contiguous(), bounds)
    codes = torch.tensor(SIGNED, device=x.device)[index] & 63
    codes = torch.where(x == 0, 0, torch.where(x.isnan(), NAR, codes))
    return torch.tensor(places, dtype=torch.uint8, device=x.device)[codes]


def decode(codes, values):
    return torch.tensor(values, device=codes.device)[codes.long()]


def posit(name, kind, place):
    """The format whose code c is stored as place(c)."""
    values = [0.0] * 64
    values[place(NAR)] = float("nan")
    for code, value in zip(SIGNED, VALUES, strict=True):
        values[place(code & 63)] = value
    return DType(
        name, BITS, kind,
        encode=partial(encode, places=[place(code) for code in range(64)], even=kind == "float"),
        decode=partial(decode, values=values),
        min=VALUES[0], max=VALUES[-1], quant_max=4.0,
        summary="posit of 6 bits, 1 of exponent", rounds_to_zero=False,
    )  # fmt: skip


def sign_flipped(code):
    return code ^ NAR


def nar_last(code):
    return (code + 31) % 64


POSITS = (
    posit("posit6", "float", lambda code: code),
    posit("posit6_flipped", "lut", sign_flipped),
    posit("posit6_nar_last", "lut", nar_last),
)


class TestOwnBits(DTypeSuite):
    records = POSITS
    dtype = "posit6"


class TestSignFlipped(DTypeSuite):
    """Its code 0 is not a number."""

    records = POSITS
    dtype = "posit6_flipped"


class TestNarLast(DTypeSuite):
    records = POSITS
    dtype = "posit6_nar_last"


class TestTransform(TransformSuite):
    records = POSITS
    config = WeightOnlyConfig("posit6_flipped", 32)
    subjects = SUBJECTS[:2]
    sqnr_range = (15.0, 35.0)


def test_values():
    assert VALUES[31:] == sorted(VALUES[31:])
    assert (VALUES[31], VALUES[-1], value_of(16)) == (2.0**-8, 2.0**8, 1.0)


@pytest.mark.parametrize("kind", ["posit", "", "Int", None])
def test_unknown_kinds_are_refused_by_name(kind):
    with pytest.raises(ConfigError, match=r"kind="):
        DType("mine", 4, kind, encode=abs, decode=abs, min=-8, max=7, quant_max=7)
