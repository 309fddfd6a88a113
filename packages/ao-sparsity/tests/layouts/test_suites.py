"""The sparse layouts pass the suite that plugin authors use, under every kind of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ao_core import WHOLE, Spec
from ao_core.ext import NO_SCALE
from ao_core.testing import LayoutSuite

#: scales by row, group and tensor; symmetric, and integer zero points. The first ones are compiled too
SPECS = (
    Spec("bf16", (1, WHOLE), NO_SCALE),
    Spec("uint4", (1, 16), "bfloat16", zero_point="int"),
    Spec("f8e4m3", (WHOLE, WHOLE)),
    Spec("int8", (1, WHOLE)),
    Spec("int4", (1, 32), "bfloat16"),
    Spec("fp16", (1, WHOLE), NO_SCALE),
    Spec("fp32", (1, WHOLE), NO_SCALE),
)
SHAPES = ((16, 64), (33, 70), (3, 8, 40))


class Fewer(LayoutSuite):
    """What takes one weight matrix for each format takes those of the first formats."""

    shapes = SHAPES
    compiled = 2

    def arguments(self) -> dict[str, Sequence[Any]]:
        found = super().arguments()
        return {**found, "weight": found["weight"][: self.compiled]}


class TestTwoFour(Fewer):
    layout = "two_four"
    specs = SPECS


class TestBsr(Fewer):
    layout = "bsr"
    specs = SPECS


class TestSmallBlocks(Fewer):
    layout = "bsr"
    compiled = 1
    specs = tuple(
        replace(spec, options=(("blocksize", 8), ("sparsity", 0.5))) for spec in SPECS[:2]
    )
