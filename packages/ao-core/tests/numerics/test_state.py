"""LUTs for the state of optimizers."""

import itertools
import math

import pytest

from ao_core.numerics import (
    companded_values,
    dynamic_values,
    linear_values,
    unsigned_float_values,
)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_dynamic_values(bits: int, signed: bool):
    values = dynamic_values(bits, signed)
    assert len(values) == 2**bits
    assert all(a < b for a, b in itertools.pairwise(values))
    assert (max(values), values.count(0.0)) == (1.0, 1)
    # every negative value has its positive twin; only 0 and 1 have none
    negative = {-value for value in values if value < 0}
    assert negative == ({value for value in values if 0 < value < 1} if signed else set())
    # twice as many values in each decade, the first of them just below 10**-(bits - 2)
    positive = [value for value in values if 0 < value < 1]
    decades = [math.floor(math.log10(value)) for value in positive]
    counts = [decades.count(decade) for decade in range(1 - bits, 0)]
    assert counts == [(1 if signed else 2) << i for i in range(bits - 1)]


def test_the_eight_bit_map_has_known_ends():
    signed, unsigned = dynamic_values(8, True), dynamic_values(8, False)
    # centres of the outermost intervals, in closed form
    assert signed[0] == pytest.approx(-(1 - 0.9 / 64 / 2), rel=1e-7)
    assert signed[128] == pytest.approx(0.55e-6, rel=1e-6)
    assert unsigned[1] == pytest.approx(0.325e-6, rel=1e-6)
    assert unsigned[-2] == pytest.approx(1 - 0.9 / 128 / 2, rel=1e-7)


def test_companded_values():
    signed, unsigned = companded_values(signed=True), companded_values(signed=False)
    assert (len(signed), len(unsigned)) == (255, 256)
    assert (signed[0], signed[127], signed[-1]) == (-1.0, 0.0, 1.0)
    assert [math.sqrt(value) * 127 for value in signed[127:]] == pytest.approx(list(range(128)))
    assert [value**0.25 * 255 for value in unsigned] == pytest.approx(list(range(256)))


def test_linear_values_leave_out_zero():
    assert linear_values(4) == tuple(i / 16 for i in range(1, 17))


def test_unsigned_float_values():
    values = unsigned_float_values()
    assert (len(values), values[0], values[-1]) == (256, 2.0**-31, 1.875)
    # the next one is an eighth to a sixteenth further, and no value has more than 3 bits of mantissa
    steps = [b / a - 1 for a, b in itertools.pairwise(values)]
    assert (min(steps), max(steps)) == (pytest.approx(1 / 15), 1 / 8)
    assert all((math.frexp(value)[0] * 16).is_integer() for value in values)
