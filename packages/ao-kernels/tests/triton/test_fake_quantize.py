"""Which blocks the kernel quantizes and dequantizes in one pass; its numbers are in proofs/interpreted."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import MX_MODES
from ao_kernels.triton.fake_quantize.op import settings

MX, NVFP4 = Spec("f8e4m3", (1, 32), "e8m0"), Spec("f4e2m1", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE)))


def reason(spec, shape=(40, 300), dtype=torch.bfloat16):
    kernel = registry.kernels.get("triton_fake_quantize")
    return kernel.refuses(Call("fake_quantize", spec, shape, shape, dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_taken(dtype):
    for element in ("f8e4m3", "f8e5m2", "f6e3m2", "f6e2m3", "f4e2m1", "int8"):
        for mode in MX_MODES:
            spec = Spec(element, (1, 32), "e8m0", options=(("mx_mode", mode),))
            assert reason(spec, dtype=dtype) is None
    assert reason(Spec("f4e2m1", (16,), "e4m3"), shape=(2, 3, 7), dtype=dtype) is None
    assert reason(NVFP4, dtype=dtype) is None


@pytest.mark.parametrize(
    ("spec", "changes", "words"),
    [
        (Spec("f8e4m3", (1, 32)), {}, "scales in e8m0"),
        (Spec("int8", (1, 32), "e4m3"), {}, "int8 with scales in e8m0"),
        (Spec("nf4", (1, 32), "e8m0"), {}, "found nf4"),
        (Spec("int8", (1, 32), "e8m0", zero_point="int"), {}, "zero_point=int"),
        (Spec("f8e4m3", (1, 48), "e8m0"), {}, "blocks of (16, 32, 64, 128)"),
        (Spec("f8e4m3", (2, 32), "e8m0"), {}, "along each row"),
        (Spec("f4e2m1", (16,), "e4m3", options=(("scale_rule", "absmean"),)), {}, "absmean"),
        (MX, {"dtype": torch.float64}, "not torch.float64"),
        (MX, {"shape": (0, 4)}, "(0, 4)"),
        (NVFP4, {"shape": (2, 3, 16)}, "one scale for a matrix"),
    ],
)
def test_what_is_refused(spec, changes, words):
    assert words in reason(spec, **changes)


def test_the_rules_for_powers_of_two():
    """Of e2m1, whose greatest value is 6 = 0.75 * 2**3, with a step of 2 below it."""
    carries = {mode: settings("f4e2m1", "e8m0", mode, assembly=True)["CARRY"] for mode in MX_MODES}
    assert carries == {"floor": 1 << 23, "ceil": 1, "even": 3 << 21, "rceil": (1 << 22) + 1}
