"""The sparse layouts pass the suite that plugin authors use, under every kind of number."""

from __future__ import annotations

from ao_core import Spec
from ao_core.spec import NO_SCALE, WHOLE
from ao_core.testing import LayoutSuite

#: blocks by row, group and tensor; symmetric, and integer zero points
SPECS = (
    *(Spec(name, (1, WHOLE), NO_SCALE) for name in ("bf16", "fp16", "fp32")),
    Spec("int8", (1, WHOLE)),
    Spec("int4", (1, 32), "bfloat16"),
    Spec("uint4", (1, 16), "bfloat16", zero="int"),
    Spec("f8e4m3", (WHOLE, WHOLE)),
    Spec("int3", (1, 24), "float16"),
    Spec("nf4", (1, 64), Spec("int8", (4, WHOLE))),
    Spec("ternary", (2, 12)),
)
SHAPES = ((16, 64), (33, 70), (3, 8, 40), (0, 16))


class TestTwoFour(LayoutSuite):
    layout = "two_four"
    specs = SPECS
    shapes = (*SHAPES, (77,))


class TestBsr(LayoutSuite):
    layout = "bsr"
    specs = SPECS
    shapes = SHAPES


class TestSmallBlocks(LayoutSuite):
    layout = "bsr"
    specs = tuple(
        Spec(s.dtype, s.block, s.scale_dtype, s.zero, options=(("blocksize", 8), ("sparsity", 0.5)))
        for s in SPECS[::3]
    )
    shapes = SHAPES
