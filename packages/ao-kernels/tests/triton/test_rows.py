"""Which rows the kernels quantize in one pass; their numbers are in proofs/interpreted."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry
from ao_kernels.triton.rows.op import launch_shape

ROW = (1, WHOLE)
OPS = ("quantize", "rms_norm_quantize", "silu_mul_quantize")


def reason(spec, op="quantize", numbers="float8", shape=(40, 300), dtype=torch.bfloat16):
    kernel = registry.kernels.get(f"triton_{numbers}_{op}")
    return kernel.refuses(Call(op, spec, shape, shape, dtype, "cuda"))


@pytest.mark.parametrize("op", OPS)
def test_what_is_taken(op):
    for numbers, spec in (
        ("float8", Spec("f8e4m3", ROW)),
        ("float8", Spec("f8e5m2", ROW)),
        ("int8", Spec("int8", ROW)),
        ("int8", Spec("uint8", ROW, zero_point="int")),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert reason(spec, op, numbers, dtype=dtype) is None
        assert reason(spec, op, numbers, shape=(2, 3, 32768)) is None


@pytest.mark.parametrize(
    ("spec", "changes", "words"),
    [
        (Spec("int8", ROW), {}, "found int8"),
        (Spec("f8e4m3", ROW, "e8m0"), {}, "scales in float32"),
        (Spec("f8e4m3", (1, 128)), {}, "one scale per row"),
        (Spec("f8e4m3", ROW, zero_point="float"), {}, "zero points of uint8"),
        (Spec("uint8", ROW), {"numbers": "int8"}, "zero points of uint8"),
        (Spec("int8", ROW, options=(("scale_rule", "absmean"),)), {"numbers": "int8"}, "absmean"),
        (Spec("f8e4m3", ROW), {"dtype": torch.float64}, "not torch.float64"),
        (Spec("f8e4m3", ROW), {"shape": (2, 32769)}, "up to 32768"),
        (Spec("f8e4m3", ROW), {"shape": (0, 4)}, "(0, 4)"),
        (Spec("f8e4m3", ROW), {"shape": (4, 0)}, "(4, 0)"),
    ],
)
def test_what_is_refused(spec, changes, words):
    assert words in reason(spec, **changes)


@pytest.mark.parametrize(
    ("k", "shape"),
    [
        (1, (128, 16, 2)),
        (512, (4, 512, 2)),
        (4096, (1, 4096, 4)),
        (14336, (1, 16384, 16)),
        (32768, (1, 32768, 32)),
    ],
)
def test_blocks_hold_whole_rows(k, shape):
    assert launch_shape(k) == shape
