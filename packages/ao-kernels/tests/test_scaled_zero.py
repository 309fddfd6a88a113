"""Conversions of the canonical layouts refuse zero points in the domain of values, in words."""

from __future__ import annotations

import pytest
import torch

from ao_core import Call, Spec
from ao_core.ext.kernels import candidates, select

SPEC = Spec("uint4", (1, 32), "float16", "offset", "packed")
SHAPE = (32, 64)


@pytest.mark.parametrize("op", ["quantize", "dequantize", "error_sums"])
def test_conversions(op):
    call = Call(op, SPEC, SHAPE, SHAPE, torch.float32, "cpu")
    assert select(call).name == f"reference_{op}"
    reasons = {c.kernel.name: c.refusal for c in candidates(call)}
    assert "offset" in reasons[f"cpu_{op}_packed"]
