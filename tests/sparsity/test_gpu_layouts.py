"""The conformance suite over the layouts that ao-kernels has for sparse weights on GPUs."""

from __future__ import annotations

from ao_core import WHOLE, Spec
from ao_core.ext import NO_SCALE
from ao_core.testing import LayoutSuite


class TestPlane24(LayoutSuite):
    layout = "plane24"
    specs = (Spec("int4", (1, 32), "bfloat16"),)
    shapes = ((33, 270),)


class TestBsrSorted(LayoutSuite):
    layout = "bsr_sorted"
    specs = (Spec("bf16", (1, WHOLE), NO_SCALE, options=(("blocksize", 16),)),)
    shapes = ((33, 70),)
