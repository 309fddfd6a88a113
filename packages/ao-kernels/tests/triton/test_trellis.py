"""Which calls the kernels for weights on a trellis serve; their numbers are in proofs/interpreted."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry

SPEC = Spec("int2", (1, WHOLE), "bfloat16", layout="trellis", options=(("scale_rule", "absmean"),))
GROUPS = Spec("int3", (1, 16), "float32", layout="trellis", options=SPEC.options)
MATRIX = (256, 96)


def reason(op, spec=SPEC, shape=MATRIX, rows=3, dtype=torch.bfloat16):
    kernel = registry.kernels.get(f"triton_trellis_{op}")
    call = Call(op, spec, shape, (rows, shape[-1]), dtype, "cuda")
    found = kernel.refuses(call)
    if found is None and op == "linear":
        assert "rows by 32 of the weight" in kernel.describe(call)
    return found


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_what_is_taken(rows):
    for dtype in (torch.bfloat16, torch.float16):
        assert reason("linear", rows=rows, dtype=dtype) is None
    assert reason("dequantize", dtype=torch.float32) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op": "linear", "rows": 65}, "up to 64 rows, found 65: decoding once is cheaper"),
        ({"op": "linear", "dtype": torch.float32}, "bfloat16 or float16, found torch.float32"),
        ({"op": "linear", "spec": GROUPS}, "one scale per row"),
        ({"op": "dequantize", "spec": GROUPS}, "one scale per row"),
        ({"op": "dequantize", "dtype": torch.float64}, "not torch.float64"),
    ],
)
def test_what_is_refused(given, words):
    assert words in reason(**given)
