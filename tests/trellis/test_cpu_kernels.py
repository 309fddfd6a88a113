"""The kernels for weights on a trellis, with each instruction set's arithmetic."""

from __future__ import annotations

import pytest
import torch

from ao_core import Call, Spec, quantize_tensor
from ao_core.ext.kernels import decode_reference, select
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian
from ao_kernels.cpu.trellis import DENSE_ROWS, encode

RULE = (("scale_rule", "absmean"),)
SPECS = tuple(
    Spec(f"int{bits}", (1, -1), scale, layout="trellis", options=RULE)
    for bits, scale in ((2, "bfloat16"), (3, "float32"), (4, "float16"))
)


class TestEncode(KernelSuite):
    kernel = "cpu_trellis_encode"


class TestDequantize(KernelSuite):
    kernel = "cpu_trellis_dequantize"
    specs = SPECS
    shapes = ((16, 64), (130, 33))


class TestLinear(KernelSuite):
    kernel = "cpu_trellis_linear"
    specs = SPECS
    shapes = ((16, 64), (130, 330))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_place_of_a_ring_is_read(spec):
    """All 128 rows of three rings, in whole and in part, at sizes beside those of vectors."""
    for rows in (384, 257, 63):
        q = quantize_tensor(gaussian((rows, 19)), spec)
        expected = decode_reference(q.parts, q.spec, (rows, 19), torch.float32)
        assert torch.equal(q.dequantize(), expected)


@pytest.mark.parametrize("rows", [DENSE_ROWS - 1, DENSE_ROWS, 70])
def test_many_rows_meet_parts_of_the_weight(rows):
    q = quantize_tensor(gaussian((1100, 40)), SPECS[0])
    x, bias = gaussian((rows, 40), seed=1), gaussian((1100,), seed=2)
    call = Call("linear", q.spec, (1100, 40), (rows, 40), torch.float32, "cpu")
    assert select(call).name == "cpu_trellis_linear"
    expected = x.double() @ q.dequantize().double().t() + bias.double()
    found = torch.nn.functional.linear(x, q, bias).double()
    assert float((found - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.zeros(2, 13), 2, 13), "even number of places"),
        ((torch.zeros(2, 12).double(), 2, 12), "x: has dtype Double"),
        ((torch.zeros(2, 12), 2, 13), "count=13"),
        ((torch.zeros(24), 2, 12), "must have 2 dimensions"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(RuntimeError, match=text):
        encode(*arguments)
