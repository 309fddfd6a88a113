"""Activations whose scales do not follow the largest magnitude: no kernel that knows no other rule serves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core import WHOLE, Spec, kernels, quantize_tensor
from ao_core.ext import repack


@pytest.mark.parametrize("rule", ["absmax", "absmean", "greatest"])
@pytest.mark.parametrize(("dtype", "layout"), [("int8", "plain"), ("int4", "packed")])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_matmuls_follow_the_rule(dtype: str, layout: str, rows: int, rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, 256, generator=generator).bfloat16() for n in (64, rows))
    act = Spec("int8", (1, WHOLE), options=(("scale_rule", rule),))
    weight = repack(quantize_tensor(w, Spec(dtype, (1, WHOLE), layout=layout, act=act)))
    found = F.linear(x, weight)
    with kernels("reference"):
        expected = F.linear(x, weight)
    assert float((found - expected).norm() / expected.norm()) < 0.01
