"""What the stored codes of a number format mean, as the C++ kernels are told: by values, never by name."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ao_core import DType

__all__ = ["Codes", "codes_of"]

#: what the op `linear` may take for granted of a table
_ANY, _INTEGER, _SYMMETRIC = range(3)


class Codes(NamedTuple):
    """A number format in the layouts `cpu_tiles` and `cpu_tiles8`."""

    bits: int
    #: exclusive or with it turns a canonical code into the stored one and back
    flip: int
    #: of `values`: 0: anything; 1: they count up by 1 from -128..0; 2: 8 bits of which the highest is
    #: the sign, and bfloat16 holds all of them
    kind: int
    #: of each stored code, exact in float32
    values: tuple[float, ...]

    @property
    def are_integers(self) -> bool:
        """Whether matmuls with 8-bit integers can take the codes, or bytes looked up by them."""
        few = len(self.values) <= 16
        return self.kind == _INTEGER or (few and all(map(_is_small_integer, self.values)))


@lru_cache(maxsize=256)
def codes_of(dtype: DType) -> Codes:
    """How the tiles store a number format.

    Signed integers are stored in offset binary, so that the least value is code 0; anything else as
    its canonical code. Where code 0 is an infinity or NaN, the code of the least magnitude changes places
    with it: padding has stored code 0, and meets activations that are 0.
    """
    flip = 1 << (dtype.bits - 1) if dtype.kind == "int" and dtype.min < 0 else 0
    with _disable_current_modes(), torch.inference_mode(False):
        stored = torch.arange(1 << dtype.bits, dtype=torch.uint8, device="cpu")
        values = tuple(dtype.decode(stored ^ flip).tolist())
        finite = [code for code, value in enumerate(values) if math.isfinite(value)]
        if finite and finite[0] != 0:
            flip = min(finite, key=lambda code: abs(values[code]))
            values = tuple(dtype.decode(stored ^ flip).tolist())
    return Codes(dtype.bits, flip, _kind(values), values)


def _kind(values: tuple[float, ...]) -> int:
    """What holds for a table, as `Codes.kind` has it."""
    least = values[0]
    if -128 <= least <= 0 and all(value == least + code for code, value in enumerate(values)):
        return _INTEGER
    halves = zip(values[:128], values[128:], strict=False)
    if len(values) == 256 and all(_opposite(a, b) for a, b in halves):
        return _SYMMETRIC
    return _ANY


def _opposite(a: float, b: float) -> bool:
    """Whether b is -a, and bfloat16 holds both."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    exact = math.isinf(a) or math.frexp(a)[0] * 256 % 1 == 0
    return a == -b and exact


def _is_small_integer(value: float) -> bool:
    return -64 <= value <= 63 and value == int(value)
