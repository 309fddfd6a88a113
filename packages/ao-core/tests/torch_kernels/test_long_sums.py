"""Matmuls and lookups whose sums and places go beyond what an int32 holds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ao_core
from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.compute import ComputeWeight
from ao_core.dispatch import select
from ao_core.layouts.int4_cpu import gather_codes
from ao_core.torch_kernels.linear import LONGEST_INT_SUM

ROW = (1, WHOLE)
INT8 = Spec("int8", ROW, act=Spec("int8", ROW))
LONG = 140_000


def test_the_bound_is_that_of_int32():
    assert LONGEST_INT_SUM * 128**2 < 2**31 <= (LONGEST_INT_SUM + 1) * 128**2


@pytest.mark.parametrize("zero_point", ["none", "int"])
@pytest.mark.parametrize("op", ["linear", "mm"])
def test_int8_matmuls_of_long_rows_are_not_summed_in_int32(op, zero_point):
    act = Spec("int8" if zero_point == "none" else "uint8", ROW, zero_point=zero_point)
    for k, by_torch in (
        (LONGEST_INT_SUM, zero_point == "none" or op == "linear"),
        (LONGEST_INT_SUM + 1, False),
    ):
        spec = Spec("int8", ROW, act=act)
        call = Call(op, spec, (16, k), (32, k), torch.float32, "cpu")
        with ao_core.kernels("reference"):
            reference = select(call).name
        assert (select(call).name != reference) == by_torch


def test_a_long_matmul_of_extremes_is_right():
    x, w = -torch.ones(2, LONG), -torch.ones(16, LONG)
    expected = torch.full((2, 16), float(LONG))
    torch.testing.assert_close(F.linear(x, quantize_tensor(w, INT8)), expected, rtol=2e-2, atol=0)
    trained = ComputeWeight(w, INT8)
    torch.testing.assert_close(F.linear(x, trained), expected, rtol=2e-2, atol=0)


def test_rows_of_large_tables_are_found_by_int32_ids():
    """The last row of 2**33 codes, of which one byte is in memory."""
    n, k = 1 << 16, 1 << 17
    qdata = torch.full((1,), 0x5A, dtype=torch.uint8).expand(n * k // 2)
    codes = gather_codes(qdata, torch.tensor([n - 1, 0], dtype=torch.int32), (n, k))
    assert codes.shape == (2, k)
    assert set(codes.unique().tolist()) <= {5, 10}
