"""The kernels of `attend` on the CPU, against the softmax over all tokens in float64."""

from __future__ import annotations

from ao_core import WHOLE, Spec
from ao_core.ext import hadamard_step
from ao_core.testing import KernelSuite

TOKEN = Spec("int8", (1, WHOLE), "float16")
CHANNEL = Spec("uint4", (128, 1), "float16", "float", "packed", input=(hadamard_step(8),))
#: the formats of the recipes of KV caches, and what meets the queries in other ways
SPECS = (
    (TOKEN, Spec("uint4", (1, 64), "float16", "float", "packed", input=(hadamard_step(8),))),
    (CHANNEL, Spec("uint4", (1, WHOLE), "float16", "float", "packed", input=(hadamard_step(8),))),
    (Spec("f8e4m3", (1, WHOLE), "float16"), Spec("f8e4m3", (1, WHOLE), "float16")),
    (Spec("int4", (1, WHOLE), "bfloat16", layout="packed"), Spec("uint8", (1, WHOLE), "float32", "float")),
    (Spec("int8", (256, 1), "float32"), Spec("int6", (1, 64), "e8m0", layout="packed")),
)  # fmt: skip


class Recipes(KernelSuite):
    specs = SPECS
    shapes = ((2, 2, 300, 64), (1, 3, 256, 136))


class TestPlain(KernelSuite):
    kernel = "cpu_attend_plain"


class TestPacked(KernelSuite):
    kernel = "cpu_attend_packed"


class TestPlainRecipes(Recipes):
    kernel = "cpu_attend_plain"


class TestPackedRecipes(Recipes):
    kernel = "cpu_attend_packed"


class TestTail(KernelSuite):
    kernel = "cpu_write_tail"
