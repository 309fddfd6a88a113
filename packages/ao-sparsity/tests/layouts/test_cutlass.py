"""The order of CUTLASS against torch's own conversions."""

from __future__ import annotations

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import NO_SCALE, to_layout
from ao_core.testing import LayoutSuite

ROW = (1, WHOLE)
BF16 = Spec("bf16", ROW, NO_SCALE, layout="two_four")
INT8 = Spec("int8", ROW, layout="two_four", act=Spec("int8", ROW))


class TestCutlass(LayoutSuite):
    layout = "two_four_cutlass"
    specs = (BF16,)
    shapes = ((32, 128),)


def weight(n, k, dtype=torch.bfloat16):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype)


@pytest.mark.parametrize("shape", [(32, 64), (64, 192), (96, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_is_what_torch_makes_of_dense_values(dtype, shape):
    n, k = shape
    k *= 1 if dtype != "int8" else 2
    spec = INT8 if dtype == "int8" else Spec(dtype, ROW, NO_SCALE, layout="two_four")
    canonical = quantize_tensor(weight(n, k) + 3.0, spec)  # no zeros, so positions are no choice
    q = to_layout(canonical, "two_four_cutlass")
    dense = canonical.dequantize(torch.float32)
    stored = dense / canonical.scale if dtype == "int8" else dense
    stored = stored.round().to(torch.int8) if dtype == "int8" else stored.to(q.qdata.dtype)
    kept, meta = sparse_semi_structured_from_dense_cutlass(stored)
    assert torch.equal(q.qdata, kept)
    assert torch.equal(q.meta, meta)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(q.qdata, q.meta), stored)


def test_groups_with_fewer_values_read_back_too():
    sparse = weight(32, 64) * (torch.arange(64) % 5 == 0)
    q = to_layout(quantize_tensor(sparse, BF16), "two_four_cutlass")
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(q.qdata, q.meta), sparse)
