"""The order of CUTLASS against torch's own conversions, and the product on top of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import ao_sparsity.kernels
from ao_core import Call, Spec, quantize_tensor
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, WHOLE
from ao_core.tensor import fake_quantize, to_layout
from ao_core.testing import LayoutSuite

ROW = (1, WHOLE)
BF16 = Spec("bf16", ROW, NO_SCALE, layout="two_four")
INT8 = Spec("int8", ROW, layout="two_four", act=Spec("int8", ROW))


class TestCutlass(LayoutSuite):
    layout = "two_four_cutlass"
    specs = (BF16, Spec("int8", ROW))
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


@pytest.mark.parametrize("tokens", [(), (1,), (3, 5), (32,)], ids=str)
@pytest.mark.parametrize("spec", [BF16, INT8], ids=["bf16", "int8"])
def test_product(spec, tokens, monkeypatch):
    """With the product of CUTLASS replaced by a dense one: what surrounds it runs on any device."""

    def mm(values, meta, x, *, out_dtype=None):
        assert x.shape[1] % 16 == 0
        dense = sparse_semi_structured_to_dense_cutlass(values, meta)
        return (dense.float() @ x.float()).to(out_dtype or values.dtype)

    monkeypatch.setattr(torch, "_sparse_semi_structured_mm", mm)
    q = quantize_tensor(weight(32, 128), spec)
    bias = weight(1, 32)[0]
    x = torch.randn(*tokens, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = x.reshape(-1, 128)
    values = rows if spec.act is None else fake_quantize(rows.float(), spec.act)
    expected = F.linear(values.float(), q.dequantize(torch.float32), bias.float())
    actual = ao_sparsity.kernels.cutlass_linear(x, to_layout(q, "two_four_cutlass"), bias)
    assert (actual.shape, actual.dtype) == ((*tokens, 32), torch.bfloat16)
    torch.testing.assert_close(actual.float().view_as(expected), expected, rtol=2e-2, atol=2e-2)


def call(spec, m=8, dtype=torch.bfloat16):
    return Call("linear", spec, (32, 128), (m, 128), dtype, "cuda")


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (call(BF16), None),
        (call(BF16, 0), "not empty"),
        (call(BF16, dtype=torch.float32), "needs activations in torch.bfloat16"),
        (call(Spec("bf16", ROW, NO_SCALE, act=Spec("int8", ROW))), "quantizes no activations"),
        (call(INT8), None),
        (call(INT8, dtype=torch.float32), None),
        (call(Spec("int8", ROW)), "symmetric int8"),
        (call(Spec("int8", ROW, act=Spec("uint8", ROW, zero="int"))), "symmetric int8"),
        (call(Spec("int8", (1, 32), act=Spec("int8", ROW))), "one scale a row"),
        (call(Spec("int8", ROW, act=Spec("int8", (1, 32)))), "a scale a token"),
        (call(Spec("int8", ROW, act=Spec("int8", (WHOLE, WHOLE), static=True))), None),
    ],
)
def test_what_it_accepts(of, reason):
    answer = registry.kernels.get("semi_structured_mm").accepts(of)
    assert (answer is None) if reason is None else reason in answer


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0)], ids=str)
def test_where_it_runs(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    answer = registry.kernels.get("semi_structured_mm").available()
    assert (answer is None) == (capability[0] == 8)


@pytest.mark.parametrize("shape", [(33, 64), (32, 70), (3, 32, 64), (0, 64)], ids=str)
def test_shapes_that_stay_canonical(shape):
    layout, dtype = registry.layouts.get("two_four_cutlass"), registry.dtypes.get("bf16")
    assert "multiples" in layout.fits(BF16, shape, dtype)
