"""Kernels of torch itself against the float64 matmul of the dequantized weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ao_core
from ao_core import WHOLE, Call, QTensor, Spec, quantize_tensor
from ao_core.dispatch import select
from ao_core.numerics import sqnr
from ao_core.tensor import repack
from ao_core.testing.samples import activations, quantized
from ao_core.torch_kernels.linear import LINEAR_KERNELS, scaled_mm_linear

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
SPECS = {
    "int8": Spec("int8", ROW),
    "int8 bf16 scale": Spec("int8", ROW, "bfloat16"),
    "int8 dynamic": Spec("int8", ROW, act=Spec("int8", ROW)),
    "int8 dynamic asymmetric": Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int")),
    "int8 static": Spec("int8", ROW, act=Spec("int8", TENSOR, static=True)),
    "int8 static asymmetric": Spec(
        "int8", ROW, act=Spec("uint8", TENSOR, zero_point="int", static=True)
    ),
    "e4m3": Spec("f8e4m3", ROW),
    "e5m2": Spec("f8e5m2", ROW),
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "uint4": Spec("uint4", (1, 64), "bfloat16", "int", "packed"),
}
#: (N, K): ragged ones, and ones that every kernel takes
SHAPES = [(33, 70), (48, 128), (112, 64), (1, 16), (16, 192)]


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _expected(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """In float64, from what the tensor says its values are."""
    out = activations(x, w) @ w.dequantize(torch.float32).double().t()
    return out if bias is None else out + bias.double()


def test_static_activations_are_served_by_the_matmuls_of_torch() -> None:
    for name in ("int8 static", "int8 static asymmetric"):
        call = Call("linear", SPECS[name], (33, 70), (5, 70), torch.float32, "cpu")
        with ao_core.kernels("torch"):
            assert select(call).name == "int_mm"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_against_float64(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n, k = shape
    w = repack(quantized(_randn(n, k, dtype=dtype), SPECS[name]))
    bias = _randn(n, dtype=dtype)
    least = {torch.float32: 100.0, torch.bfloat16: 40.0, torch.float16: 55.0}[dtype]
    for x_shape in [(1, k), (3, k), (2, 5, k), (k,), (17, k)]:
        x = _randn(*x_shape, dtype=dtype)
        for b in (None, bias):
            y = F.linear(x, w, b)
            assert y.dtype == dtype
            assert y.shape == (*x_shape[:-1], n)
            assert sqnr(_expected(x, w, b), y) > least, (select_name(x, w), x_shape)
    assert F.linear(x.new_zeros(0, k), w, bias).shape == (0, n)


def select_name(x: Tensor, w: QTensor) -> str:
    call = Call("linear", w.spec, w.stored_shape, tuple(x.shape), x.dtype, "cpu")
    return select(call).name


def test_each_kernel_serves_what_it_is_for() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = {
        ("int8", fp32, 1): "row_scaled",
        ("int8 bf16 scale", bf16, 4): "int8pack",
        ("int8", bf16, 4): "row_scaled",
        ("int8", bf16, 64): "row_scaled",
        ("int8 dynamic", fp32, 64): "int_mm",
        ("int8 dynamic asymmetric", bf16, 1): "int_mm",
        ("e4m3", bf16, 4): "row_scaled",
        ("int4", bf16, 4): "int4pack",
        ("uint4", bf16, 4): "int4pack",
        ("uint4", fp32, 4): "reference_linear",
    }
    for (name, dtype, m), kernel in cases.items():
        w = repack(quantize_tensor(_randn(48, 128, dtype=dtype), SPECS[name]))
        assert select_name(_randn(m, 128, dtype=dtype), w) == kernel, (name, dtype, m)


@pytest.mark.parametrize("block", [ROW, TENSOR], ids=["row", "tensor"])
def test_scaled_mm(block: tuple[int, int]) -> None:
    """Chosen on CUDA only; the same code runs on the CPU."""
    spec = Spec("f8e4m3", block, act=Spec("f8e4m3", block))
    w = quantize_tensor(_randn(32, 64, dtype=torch.bfloat16), spec)
    x, bias = _randn(5, 64, dtype=torch.bfloat16), _randn(32, dtype=torch.bfloat16)
    assert 45 < sqnr(_expected(x, w, bias), scaled_mm_linear(x, w, bias)) < 65
    (kernel,) = [k for k in LINEAR_KERNELS if k.name == "scaled_mm"]
    call = Call("linear", spec, (32, 64), (5, 64), torch.bfloat16, "cuda")
    assert kernel.refuses(call) is None
    refused = {
        "multiples of 16": Call("linear", spec, (32, 65), (5, 65), torch.bfloat16, "cuda"),
        "rounds its result": Call("linear", spec, (32, 64), (5, 64), torch.float32, "cuda"),
        "at run time": Call("linear", SPECS["e4m3"], (32, 64), (5, 64), torch.bfloat16, "cuda"),
    }
    for reason, call in refused.items():
        assert reason in (kernel.refuses(call) or "")


@pytest.mark.parametrize("block", [ROW, TENSOR], ids=str)
def test_scaled_mm_with_static_activations(block: tuple[int, int]) -> None:
    """One scale of the activations beside one per row of the weight, or one of each."""
    spec = Spec("f8e4m3", block, act=Spec("f8e5m2", TENSOR, static=True))
    w = quantized(_randn(32, 64, dtype=torch.bfloat16), spec)
    x, bias = _randn(5, 64, dtype=torch.bfloat16), _randn(32, dtype=torch.bfloat16)
    assert 45 < sqnr(_expected(x, w, bias), scaled_mm_linear(x, w, bias)) < 65
    (kernel,) = [k for k in LINEAR_KERNELS if k.name == "scaled_mm"]
    assert kernel.refuses(Call("linear", spec, (32, 64), (5, 64), torch.bfloat16, "cuda")) is None
    group = replace(spec, block=(1, 32))
    call = Call("linear", group, (32, 64), (5, 64), torch.bfloat16, "cuda")
    assert "or static activations" in (kernel.refuses(call) or "")


def test_int_mm_knows_the_limits_of_cuda() -> None:
    (kernel,) = [k for k in LINEAR_KERNELS if k.name == "int_mm"]
    call = Call("linear", SPECS["int8 dynamic"], (32, 64), (17, 64), torch.bfloat16, "cuda")
    assert kernel.refuses(call) is None
    small = Call("linear", SPECS["int8 dynamic"], (32, 64), (16, 64), torch.bfloat16, "cuda")
    assert "more than 16 rows" in (kernel.refuses(small) or "")


def test_non_contiguous_activations() -> None:
    for name in ("int8", "int4", "int8 dynamic"):
        w = repack(quantize_tensor(_randn(48, 128, dtype=torch.bfloat16), SPECS[name]))
        x = _randn(128, 6, dtype=torch.bfloat16).t()
        assert torch.equal(F.linear(x, w), F.linear(x.contiguous(), w))
        first = _randn(3, 5, 128, dtype=torch.bfloat16)[:, 0]  # the first token of each text
        assert torch.equal(F.linear(first, w), F.linear(first.contiguous(), w))


def test_the_native_layout_is_no_larger_and_follows_the_dtype() -> None:
    for name in ("int4", "uint4"):
        packed = quantize_tensor(_randn(208, 128, dtype=torch.bfloat16), SPECS[name])
        w = repack(packed)
        assert w.spec.layout == "int4_cpu"
        assert w.stored_bytes == packed.stored_bytes
        assert w.float().spec.layout == "packed"
        for part, value in packed.parts.items():
            assert torch.equal(w.canonical().parts[part], value)


def test_reference_band_serves_native_layouts_too() -> None:
    w = repack(quantize_tensor(_randn(48, 128, dtype=torch.bfloat16), SPECS["uint4"]))
    x = _randn(3, 128)
    with ao_core.kernels("reference"):
        assert sqnr(_expected(x, w, None), F.linear(x, w)) > 100


@pytest.mark.parametrize("rows", [16, 64, 80, 112, 208])
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_lookups_read_only_their_rows(name: str, rows: int) -> None:
    packed = quantize_tensor(_randn(rows, 128, dtype=torch.bfloat16), SPECS[name])
    w = repack(packed)
    assert w.spec.layout == "int4_cpu"
    ids = torch.tensor([[0, rows - 1, 7], [rows // 2, 7, 15]])
    assert torch.equal(F.embedding(ids, w), F.embedding(ids, packed.dequantize()))
    assert F.embedding(ids[:0], w).shape == (0, 3, 128)
    call = Call("embedding", w.spec, w.stored_shape, (2, 3), torch.int64, "cpu")
    assert select(call).name == "int4_cpu_rows"


@pytest.mark.parametrize("offset", [1, 2, 8, 16])
@pytest.mark.parametrize("rows", [1, 4])
def test_activations_and_weights_at_any_address(offset: int, rows: int) -> None:
    """Views into larger buffers: torch's own op crashes the process at some addresses."""
    w = quantize_tensor(_randn(32, 64).bfloat16(), SPECS["int8 bf16 scale"])
    x = _randn(rows * 64 + offset)[offset:].bfloat16().view(rows, 64)
    moved = torch.zeros(offset + rows * 64, dtype=torch.bfloat16)[offset:].view(rows, 64).copy_(x)
    shifted = torch.zeros(offset + 32 * 64, dtype=torch.int8)[offset:].view(32, 64)
    other = w.like({**w.parts, "qdata": shifted.copy_(w.qdata)})
    assert select(Call("linear", w.spec, (32, 64), (rows, 64), x.dtype, "cpu")).name == "int8pack"
    assert torch.equal(F.linear(moved, w), F.linear(x, w))
    assert torch.equal(F.linear(moved, other), F.linear(x, w))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(F.linear, fullgraph=True)
        assert sqnr(F.linear(x, w), compiled(moved, w)) > 40
    torch._dynamo.reset()
