"""The conformance suites over the layouts in tiles and the kernels for them."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.testing import KernelSuite, LayoutSuite
from ao_core.testing.base import gaussian
from ao_core.testing.samples import SPECS, Sample

ROW = (1, WHOLE)
ACTS = (
    Spec("int8", ROW),
    Spec("uint8", ROW, zero_point="int"),
    Spec("f8e4m3", ROW),
    Spec("f8e5m2", ROW),
)
NAMES = [dtype.name for dtype in registry.dtypes.values() if dtype.kind not in ("table", "dense")]
E4M3 = Spec("f8e4m3", (WHOLE, WHOLE))
SUPER = Spec("uint6", (1, 8), "float16", layout="packed")
INTEGERS = [name for name in NAMES if registry.dtypes.get(name).kind == "int"]

#: what `SPECS` does not have: parts that only some formats in tiles have, and odd widths
LAYOUT_SPECS = (
    Spec("nf4", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE))),
    *SPECS,
    Spec("ternary", (1, 32), "bfloat16"),
    Spec("uint6", (3, 32), "float16", "float"),
    Spec("f6e3m2", (1, 32), "e8m0"),
    Spec("uint8", (1, 32), Spec("f8e4m3", (WHOLE, WHOLE)), "int"),
    Spec("int3", (1, 32), "float16", "float"),
    Spec("uint4", (1, 32), "bfloat16", "int"),
    Spec("int7", (1, 32), SUPER, "offset"),
    Spec("uint7", (1, 32), "float16", "offset"),
)
#: every number format, and every one that goes with each way to quantize activations
MATMUL_SPECS = (
    *SPECS,
    Spec("nf4", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE))),
    *(Spec(name, (1, 32), "bfloat16") for name in NAMES),
    *(Spec("uint4", (1, 32), SUPER, "offset", act=act) for act in ACTS),
    *(Spec(name, (1, 32), "float16", act=act) for name in INTEGERS for act in ACTS[:2]),
    *(Spec(name, (1, 32), "e8m0", act=act) for name in NAMES for act in ACTS[2:]),
)
#: activations that are rounded before the matmul
ROUNDED_SPECS = (
    Spec("f8e4m3", (128, 128), act=Spec("f8e4m3", (1, 128))),
    Spec("f8e4m3", (1, 32), "e8m0", act=Spec("f8e4m3", (1, 32), "e8m0")),
    Spec("f4e2m1", (1, 16), E4M3, act=Spec("f4e2m1", (1, 16), E4M3)),
    Spec("int4", (1, 32), "bfloat16", act=Spec("int4", ROW)),
    Spec("nf4", (1, 32), "bfloat16", act=ACTS[1]),
)


class TestTiles(LayoutSuite):
    layout = "cpu_tiles"
    specs = LAYOUT_SPECS


class TestTiles8(LayoutSuite):
    layout = "cpu_tiles8"
    specs = LAYOUT_SPECS


class Dynamic(LayoutSuite):
    """Weights with a part for activations that have zero points; matmuls then are not exact."""

    specs = (
        Spec("int4", (1, 32), "bfloat16", act=ACTS[1]),
        Spec("int8", ROW, act=ACTS[1]),
    )

    @pytest.mark.parametrize("lead", [(), (1,), (4,), (0,), (2, 3)], ids=str)
    def test_linear(self, lead: tuple[int, ...], weight: Sample) -> None:
        """What the reference gives, which quantizes the activations too."""
        q, x = weight.quantized(), gaussian((*lead, weight.shape[1]))
        expected = registry.kernels.get("reference_linear").fn(x, q, None)
        for out in (F.linear(x, q), x @ q.t()):
            assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
            assert (out - expected).norm() <= 1e-5 * expected.norm()


class TestDynamicTiles(Dynamic):
    layout = "cpu_tiles"


class TestDynamicTiles8(Dynamic):
    layout = "cpu_tiles8"


class TestDigits(LayoutSuite):
    layout = "cpu_digits"
    specs = (Spec("ternary", (WHOLE, WHOLE), "bfloat16"), Spec("ternary", (1, 32), "float32"))


class TestTwoFour(LayoutSuite):
    layout = "cpu_two_four"
    specs = (Spec("int4", (1, 32), "bfloat16"), Spec("int8", ROW), Spec("f8e4m3", ROW, "bfloat16"))


class TestLinear(KernelSuite):
    kernel = "cpu_tiles_linear"
    specs = (*MATMUL_SPECS, *ROUNDED_SPECS)


class TestLinear8(KernelSuite):
    kernel = "cpu_tiles8_linear"
    specs = (*MATMUL_SPECS, *ROUNDED_SPECS)


class TestGrouped(KernelSuite):
    kernel = "cpu_tiles_grouped_linear"
    specs = (*MATMUL_SPECS, *ROUNDED_SPECS)


class TestGrouped8(KernelSuite):
    kernel = "cpu_tiles8_grouped_linear"
    specs = (*MATMUL_SPECS, *ROUNDED_SPECS)


class TestLinearOfDigits(KernelSuite):
    kernel = "cpu_digits_as_tiles"
    specs = tuple(Spec("ternary", (1, 32), "bfloat16", act=act) for act in (None, *ACTS))


class TestLinearOfTwoFour(KernelSuite):
    kernel = "cpu_two_four_as_tiles"
    specs = (
        Spec("int4", (1, 32), "bfloat16"),
        Spec("f8e5m2", ROW, act=ACTS[3]),
        Spec("f8e4m3", ROW, act=ACTS[2]),
        *(Spec("int8", ROW, act=act) for act in (None, *ACTS)),
        Spec("int8", ROW, act=Spec("int8", (WHOLE, WHOLE), static=True)),
    )
