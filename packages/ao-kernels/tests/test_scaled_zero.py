"""Zero points in the domain of values are refused, in words, and served by the reference."""

from __future__ import annotations

import pytest
import torch

from ao_core.dispatch import candidates, select
from ao_core.records import Call
from ao_core.spec import Spec
from ao_core.tensor import native, quantize_tensor

SPEC = Spec("uint4", (1, 32), "float16", "scaled", "packed")
SHAPE = (32, 64)


@pytest.mark.parametrize("op", ["quantize", "dequantize", "error_sums"])
def test_conversions(op):
    call = Call(op, SPEC, SHAPE, SHAPE, torch.float32, "cpu")
    assert select(call).name == f"reference_{op}"
    reasons = {c.kernel.name: c.refusal for c in candidates(call)}
    assert "scaled" in reasons[f"cpu_{op}_packed"]


def test_the_layout_of_the_products():
    q = quantize_tensor(torch.randn(SHAPE), SPEC)
    assert native(q).spec.layout == "packed"
    other = quantize_tensor(torch.randn(SHAPE), Spec("int4", (1, 32), "float16", layout="packed"))
    assert native(other).spec.layout == "cpu_tiles"
