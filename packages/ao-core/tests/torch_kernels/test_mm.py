"""Kernels of two dense operands: their limits, and matmuls of torch that are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Call, Kernel, Spec, quantize_tensor
from ao_core.dispatch import select
from ao_core.numerics import sqnr
from ao_core.tensor.encoding import fake_quantize
from ao_core.torch_kernels.mm import MM_KERNELS, int_mm, scaled_mm
from ao_core.torch_kernels.reference import linear as reference_linear
from ao_core.torch_kernels.reference import mm

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
FLOAT8 = {b: Spec("f8e4m3", b, act=Spec("f8e4m3", b)) for b in (ROW, TENSOR)}
INT8 = Spec("int8", ROW, act=Spec("int8", ROW))


def _kernel(name: str) -> Kernel:
    (kernel,) = [k for k in MM_KERNELS if k.name == name]
    return kernel


def _call(spec: Spec, m: int = 17, n: int = 32, k: int = 64, device: str = "cuda") -> Call:
    return Call("mm", spec, (n, k), (m, k), torch.bfloat16, device)


def test_limits_of_float8_matmuls() -> None:
    refuses = _kernel("scaled_matmul").refuses
    for spec in FLOAT8.values():
        assert refuses(_call(spec, n=33, k=65)) is None
    assert refuses(replace(_call(FLOAT8[TENSOR]), x_dtype=torch.float32)) is None
    e5m2 = replace(FLOAT8[ROW], dtype="f8e5m2")
    assert refuses(_call(e5m2)) is None
    blocks = replace(FLOAT8[ROW], block=(128, 128), act=Spec("f8e4m3", (1, 128)))
    refused = {
        "bfloat16": replace(_call(FLOAT8[ROW]), x_dtype=torch.float32),
        "not torch.float16": replace(_call(FLOAT8[TENSOR]), x_dtype=torch.float16),
        "in float8": _call(INT8),
        "two operands": _call(replace(FLOAT8[ROW], act=None)),
        "e5m2 with e5m2": _call(replace(e5m2, act=Spec("f8e5m2", ROW))),
        "both per row": _call(blocks),
        "not empty": _call(FLOAT8[ROW], m=0),
    }
    for reason, call in refused.items():
        assert reason in (refuses(call) or "")


def test_limits_of_int8_matmuls() -> None:
    refuses = _kernel("int_matmul").refuses
    assert refuses(_call(INT8)) is None
    assert refuses(_call(INT8, m=1, n=33, k=65, device="cpu")) is None
    refused = {
        "more than 16 rows": _call(INT8, m=16),
        "in int8": _call(replace(INT8, act=None)),
        "one scale per row": _call(replace(INT8, block=(1, 32))),
        "wrong sums": _call(INT8, k=1, device="cpu"),
        "not empty": _call(INT8, n=0),
    }
    for reason, call in refused.items():
        assert reason in (refuses(call) or "")


@pytest.mark.parametrize("block", FLOAT8, ids=["row", "tensor"])
@pytest.mark.parametrize("options", [(), (("fast_accum", False),)], ids=["fast", "exact"])
def test_float8_matmuls_are_the_emulated_ones(
    block: tuple[int, int], options: tuple[tuple[str, bool], ...]
) -> None:
    """Padded, too: torch has them on the CPU, where they are slower than emulation."""
    spec = replace(FLOAT8[block], options=options)
    a, b = torch.randn(19, 70).bfloat16(), torch.randn(33, 70).bfloat16()
    expected = mm(a, b, spec)
    assert float(sqnr(expected.float(), scaled_mm(a, b, spec).float())) > 60
    exact = a.double() @ b.double().t()
    assert 25 < float(sqnr(exact, expected.double())) < 35
    a[3, 5] = torch.nan
    assert scaled_mm(a, b, spec)[3].isnan().all()


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize(("m", "k", "n"), [(64, 128, 32), (1, 1, 17), (300, 129, 1)])
def test_float8_products_of_any_size(m: int, k: int, n: int, dtype: str) -> None:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    for block in FLOAT8:
        spec = Spec("f8e4m3", block, act=Spec(dtype, block))
        found, expected = scaled_mm(a, b, spec), mm(a, b, spec)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert float(sqnr(expected.float(), found.float())) >= 60


@pytest.mark.parametrize("block", FLOAT8, ids=["row", "tensor"])
def test_operands_are_as_cuda_wants_them(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row-major times column-major, both in steps of 16, scales contiguous in float32."""
    multiply = torch._scaled_mm

    def checked(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, **options: Any) -> Tensor:
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0])
        assert not any(size % 16 for size in (a.shape[1], *b.shape))
        shapes = ((), ()) if block == TENSOR else ((len(a), 1), (1, b.shape[1]))
        assert (tuple(a_scale.shape), tuple(b_scale.shape)) == shapes
        assert a_scale.is_contiguous()
        assert b_scale.is_contiguous()
        assert a_scale.dtype == b_scale.dtype == torch.float32
        return multiply(a, b, a_scale, b_scale, **options)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    for m, k, n in [(64, 128, 32), (19, 70, 33), (1, 1, 17)]:
        for transposed in (False, True):
            a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
            if transposed:
                a, b = (x.t().contiguous().t() for x in (a, b))
            assert scaled_mm(a, b, FLOAT8[block]).shape == (m, n)


@pytest.mark.parametrize(("m", "k", "n"), [(19, 70, 33), (64, 128, 32), (300, 129, 1)])
def test_int8_matmuls_are_the_emulated_ones(m: int, k: int, n: int) -> None:
    a, b = torch.randn(m, k), torch.randn(n, k)
    assert float(sqnr(mm(a, b, INT8), int_mm(a, b, INT8))) > 100


def test_a_layer_with_one_input() -> None:
    """torch 2.13 gives wrong sums over a single element in int8 on some processors: nobody asks it to."""
    x = torch.randn(5, 1)
    w = quantize_tensor(torch.randn(33, 1), INT8)
    assert select(Call("linear", w.spec, (33, 1), (5, 1), x.dtype, "cpu")).name != "int_mm"
    assert float(sqnr(x @ w.dequantize().t(), F.linear(x, w))) > 38


def test_codes_beyond_the_greatest_float16() -> None:
    """Code -8 of int4 stands for more than the number that chose its scale; the output is a usual one."""
    act = Spec("int4", ROW, act=None)
    w = quantize_tensor(1e-3 * torch.randn(33, 64), Spec("int4", ROW, act=act))
    x = torch.full((3, 64), -65000.0).half()
    out = reference_linear(x, w, None)
    exact = fake_quantize(x.float(), act).double() @ w.dequantize().double().t()
    assert fake_quantize(x.float(), act).abs().max() > torch.finfo(torch.float16).max
    assert out.dtype == torch.float16
    assert ((out.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-2).all()
