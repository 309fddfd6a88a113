import pytest
import torch
import torch.nn.functional as F

from ao_core.numerics import linear
from ao_core.numerics.linear import FastLinear, fast_linear

SLOW = frozenset({torch.bfloat16, torch.float16})


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    monkeypatch.setattr(linear, "_slow", lambda: SLOW)


def operands(dtype, bias=True):
    shapes = [(3, 5, 97), (31, 97), *([(31,)] if bias else [])]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def check_rounded_once(out, exact, dtype):
    assert out.dtype == dtype
    step = torch.finfo(dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= step / 2 + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", SLOW, ids=str)
def test_sums_are_of_float32_and_rounded_once(dtype):
    tensors = [x.requires_grad_() for x in operands(dtype)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, exact = fast_linear(*tensors), F.linear(*wide)
    check_rounded_once(out, exact, dtype)
    by = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, by)
    for found, wanted in zip(gradients, torch.autograd.grad(exact, wide, by.double()), strict=True):
        check_rounded_once(found, wanted, dtype)


def test_autocast_rounds_operands_first():
    tensors = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), FastLinear():
        out = F.linear(*tensors)
        assert torch.is_autocast_enabled("cpu")
    check_rounded_once(out, F.linear(*(x.bfloat16().double() for x in tensors)), torch.bfloat16)


def test_other_tensors_are_torchs(monkeypatch):
    calls, torchs = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *args: calls.append(args) or torchs(*args))
    fast_linear(*operands(torch.float32))
    fast_linear(*(x.to("meta") for x in operands(torch.bfloat16)))
    with torch.autocast("cpu"):
        fast_linear(*operands(torch.float64, bias=False))
    devices = [(args[0].device.type, args[0].dtype) for args in calls]
    assert devices == [("cpu", torch.float32), ("meta", torch.bfloat16), ("cpu", torch.float64)]


def test_what_is_slow_is_what_onednn_says(monkeypatch):
    monkeypatch.undo()
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (torch.bfloat16 in linear._slow()) is not supported
