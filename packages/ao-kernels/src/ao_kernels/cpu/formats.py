"""Number formats as the C++ code that encodes and decodes is told of them: by tables, never by name."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ao_core import DType

__all__ = ["Format", "format_of"]

#: `Rule` of csrc/cpu/quantize/kernels.h that each kind of format may follow, besides the search
_RULES = {"int": 1, "float": 2}
_SEARCH = 0
#: keys, integers in the order of the numbers, of the infinities
_LEAST, _GREATEST = -0x7F800001, 0x7F800000


class Format(NamedTuple):
    """What the op `encode` is told of a number format, in its order."""

    #: float32, the value of each code
    table: Tensor
    #: int32, the key of the first number of every interval with one code, but of the lowest
    steps: Tensor
    #: uint8, the codes of the intervals
    order: Tensor
    nan_code: int
    #: 0: search among the steps; 1: nearest integer; 2: rounded float
    rule: int


@lru_cache(maxsize=256)
def format_of(dtype: DType) -> Format | str:
    """The format, or a sentence that says why the C++ code cannot encode as the format does itself.

    Its `encode` is asked for the code of enough numbers to know all of them: of those on both sides
    of every step. Integers and floats that then prove to be usual ones take a faster way.
    """
    if dtype.bits > 8:
        return f"{dtype.name} has codes of more than 8 bits"
    with _disable_current_modes(), torch.inference_mode(False):
        codes = torch.arange(1 << dtype.bits, dtype=torch.uint8, device="cpu")
        table = dtype.decode(codes).to(torch.float32)
        steps = _steps(dtype, table)
        if steps is None:
            return f"{dtype.name} does not encode in steps, one for each code at most"
        ends = torch.cat([steps, torch.tensor([_GREATEST])])
        order = _pad(dtype.encode(_number(ends - 1)), len(codes))
        nan_code = int(dtype.encode(torch.tensor([torch.nan])))
        keys = _pad(steps.to(torch.int32), len(codes) - 1, torch.iinfo(torch.int32).max)
        for rule in (_RULES.get(dtype.kind, _SEARCH), _SEARCH):
            found = Format(table, keys, order, nan_code, rule)
            if _agrees(found, dtype, steps):
                return found
    return f"{dtype.name} encodes in a way of its own"


def _number(keys: Tensor) -> Tensor:
    """The float32 of each key (int64), as `key_of` of the C++ code orders them."""
    bits = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return bits.to(torch.int32).view(torch.float32)


def _key(numbers: Tensor) -> Tensor:
    bits = numbers.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _steps(dtype: DType, table: Tensor) -> Tensor | None:
    """Keys at which the code changes, found by bisection; None if there are too many."""
    zeros = torch.tensor([-1, 0])
    values = _key(table[table.isfinite()])
    seeds = torch.cat([values, zeros, torch.tensor([_LEAST, _GREATEST])]).unique()
    low, high = seeds[:-1], seeds[1:]
    while True:
        changes = dtype.encode(_number(low)) != dtype.encode(_number(high))
        low, high = low[changes], high[changes]
        if len(low) >= 2 * len(table):
            return None
        if bool((high - low == 1).all()):
            return high.unique() if len(high) < len(table) else None
        middle = (low + high) // 2
        low, high = torch.cat([low, middle]), torch.cat([middle, high])
        low, high = low[high > low], high[high > low]


def _pad(values: Tensor, size: int, value: int | None = None) -> Tensor:
    """As many as `size`: with `value`, or with the last one again."""
    rest = values[-1:] if value is None else values.new_tensor([value])
    return torch.cat([values, rest.expand(size - len(values))])


def _agrees(found: Format, dtype: DType, steps: Tensor) -> bool:
    """Whether the C++ code and the format encode alike: beside all steps, and in between."""
    spread = torch.linspace(_LEAST, _GREATEST, 4099, dtype=torch.float64).to(torch.int64)
    edges = torch.cat([steps - 1, steps, spread, torch.tensor([_LEAST, -1, 0, _GREATEST])])
    numbers = torch.cat([_number(edges), torch.tensor([torch.nan])])
    size = len(numbers)
    try:
        codes = torch.ops.ao_kernels.encode(
            numbers, torch.ones(1), None, *found, 1, size, 1, size, False
        )
    except RuntimeError:
        return False
    return torch.equal(codes.reshape(-1), dtype.encode(numbers))
