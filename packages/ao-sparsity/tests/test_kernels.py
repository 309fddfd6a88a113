"""Matmuls of torch for 2:4 weights, with dense ones in place of CUDA's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

from ao_core import WHOLE, Call, QTensor, Spec, quantize_tensor
from ao_core.ext import NO_SCALE, UnsupportedOp, fake_quantize, registry, to_layout
from ao_sparsity.kernels import cslt_linear, cutlass_linear

ROW = (1, WHOLE)
BF16 = Spec("bf16", ROW, NO_SCALE, layout="two_four")
INT8 = Spec("int8", ROW, layout="two_four", act=Spec("int8", ROW))
STATIC = Spec("int8", ROW, layout="two_four", act=Spec("int8", (WHOLE, WHOLE), static=True))
KERNELS = {"two_four_cutlass": "semi_structured_mm", "two_four_cslt": "cusparselt_mm"}


def weight(n, k):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).bfloat16()


def matmul(dense, x, out_dtype):
    assert x.shape[1] % 16 == 0
    return (dense.float() @ x.float()).to(out_dtype or dense.dtype)


def semi_structured_mm(values, meta, x, *, out_dtype=None):
    return matmul(sparse_semi_structured_to_dense_cutlass(values, meta), x, out_dtype)


def cslt_sparse_mm(packed, x, *, out_dtype=None, transpose_result=False):
    out = matmul(packed, x, out_dtype)
    return out.t() if transpose_result else out


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch, "_sparse_semi_structured_mm", semi_structured_mm)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", cslt_sparse_mm)
    # cuSPARSELt's order is its own: any that holds the values will do
    monkeypatch.setattr(torch, "_cslt_compress", torch.clone)


def stored(q, layout):
    if layout == "two_four_cutlass":
        return to_layout(q, layout)
    record = registry.layouts.get(layout)
    codes, _, _ = q.layout_record.unpack(q.parts, q.spec, q.stored_shape, q.format)
    parts = {"qdata": torch._cslt_compress(codes.view(q.format.storage))}
    parts |= {name: part for name, part in q.parts.items() if name not in ("qdata", "index")}
    back = record.to_canonical(parts, q.spec, q.stored_shape, q.format)
    assert {n: p.tolist() for n, p in back.items()} == {n: q.parts[n].tolist() for n in back}
    return q.like(parts)


@pytest.mark.parametrize("tokens", [(), (1,), (3, 5), (32,)], ids=str)
@pytest.mark.parametrize("spec", [BF16, INT8, STATIC], ids=["bf16", "int8", "static"])
@pytest.mark.parametrize("layout", KERNELS)
def test_matmul(layout, spec, tokens):
    q = quantize_tensor(weight(32, 128), spec, act_scale=0.03 if spec is STATIC else None)
    x = torch.randn(*tokens, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias, rows = weight(1, 32)[0], x.reshape(-1, 128).float()
    scale = getattr(q, "act_scale", None)
    values = rows if spec.act is None else fake_quantize(rows, spec.act, scale)
    expected = F.linear(values, q.dequantize(torch.float32), bias.float())
    linear = cutlass_linear if layout == "two_four_cutlass" else cslt_linear
    actual = linear(x, stored(q, layout), bias)
    assert (actual.shape, actual.dtype) == ((*tokens, 32), torch.bfloat16)
    torch.testing.assert_close(actual.float().view_as(expected), expected, rtol=2e-2, atol=2e-2)


def call(spec, m=8, dtype=torch.bfloat16):
    return Call("linear", spec, (32, 128), (m, 128), dtype, "cuda")


@pytest.mark.parametrize("name", KERNELS.values())
@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (call(BF16), None),
        (call(BF16, 0), "not empty"),
        (call(BF16, dtype=torch.float32), "needs activations in torch.bfloat16"),
        (call(Spec("bf16", ROW, NO_SCALE, act=Spec("int8", ROW))), "quantizes no activations"),
        (call(INT8), None),
        (call(INT8, dtype=torch.float32), None),
        (call(STATIC), None),
        (call(Spec("int8", ROW)), "symmetric int8"),
        (call(Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int"))), "symmetric int8"),
        (call(Spec("int8", (1, 32), act=Spec("int8", ROW))), "one scale per row"),
        (call(Spec("int8", ROW, act=Spec("int8", (1, 32)))), "one scale per token"),
    ],
)
def test_what_they_accept(of, reason, name):
    answer = registry.kernels.get(name).refuses(of)
    assert (answer is None) if reason is None else reason in answer


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("has_it", [True, False])
def test_where_they_run(capability, has_it, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: has_it)
    runs = [registry.kernels.get(name).unavailable() is None for name in KERNELS.values()]
    assert runs == [capability[0] == 8, capability[0] >= 8 and has_it]


@pytest.mark.parametrize("shape", [(33, 64), (32, 72), (3, 32, 64), (0, 64)], ids=str)
def test_shapes_that_stay_canonical(shape):
    dtype = registry.dtypes.get("bf16")
    for name in KERNELS:
        assert "multiples" in registry.layouts.get(name).refuses(BF16, shape, dtype)


def test_cusparselt_arranges_on_a_gpu_only():
    q = quantize_tensor(weight(32, 64), BF16)
    with pytest.raises(UnsupportedOp, match="on a GPU; found cpu"):
        to_layout(q, "two_four_cslt")
    assert isinstance(q, QTensor)
