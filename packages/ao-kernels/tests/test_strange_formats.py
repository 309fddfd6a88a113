"""Number formats as only a stranger would make them: codes in any order, code 0 no number, no 0."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from ao_core import DType
from ao_core.ext import registry
from ao_core.ext.numerics import encode_lut
from ao_core.testing import DTypeSuite
from ao_core.testing.registered import registered


def encode(x, values, places):
    codes = encode_lut(x, values).long()
    of_nan = places[-1]
    return torch.where(x.isnan(), of_nan, torch.tensor(places, device=x.device)[codes]).to(
        torch.uint8
    )


def decode(codes, table):
    return torch.tensor(table, device=codes.device)[codes.long()]


def strange(name, values, places, bits):
    """Increasing `values`, of which the code of each is its place; the last place is that of NaN."""
    table = [math.nan] * (1 << bits)
    for value, place in zip(values, places, strict=False):
        table[place] = value
    return DType(
        name, bits, "lut",
        encode=partial(encode, values=tuple(values), places=places), decode=partial(decode, table=table),
        min=values[0], max=values[-1], quant_max=values[-1], summary="strange",
    )  # fmt: skip


def spread(count):
    return [float(i * abs(i)) for i in range(-count, count + 1)]


FORMATS = (
    strange("nan_first4", spread(7), [*range(1, 16), 0], 4),
    strange("nan_first6", spread(31), [*range(1, 64), 0], 6),
    strange("nan_first8", spread(127), [*range(1, 256), 0], 8),
    # a NaN at 0 without 0 among the values, and codes from the greatest value to the least
    strange("no_zero3", [-4.0, -2.0, -1.0, 0.5, 1.0, 2.0, 4.0], [7, 6, 5, 4, 3, 2, 1, 0], 3),
)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_matmuls_are_right_at_any_width(fmt):
    with registered(*FORMATS):
        type("Suite", (DTypeSuite,), {"dtype": fmt.name})().test_matmuls("cpu")


@pytest.mark.parametrize("name", [d.name for d in registry.dtypes.values() if d.kind != "codebook"])
def test_matmuls_of_known_formats(name):
    type("Suite", (DTypeSuite,), {"dtype": name})().test_matmuls("cpu")
